"""Policies and algorithms of other packages, by entry points."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from robopolicy import extensions
from robopolicy.algorithms import ALGORITHMS
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.errors import UserError
from robopolicy.limits import Positive
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.compose import compose_config
from robopolicy.training.loop import start_run


@dataclass(frozen=True)
class TimidConfig(PPOConfig):
    """Settings of `Timid`."""

    courage: Positive = 0.5  # share of the learning rate


class Timid(PPO):
    """PPO under another name."""

    name = "timid"
    config: TimidConfig


def add() -> None:
    ALGORITHMS["timid"] = TimidConfig, Timid


def broken() -> None:
    raise ImportError("libnothing.so is missing\nand more")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install functions of this module as extensions."""
    extensions.load_extensions(extensions.TASKS)  # the built-in tasks stay

    def install(*names: str) -> None:
        points = [EntryPoint(name, f"{__name__}:{name}", extensions.EXTENSIONS) for name in names]
        monkeypatch.setattr(extensions, "_loaded", set())
        monkeypatch.setattr(extensions, "entry_points", lambda group: points if group == extensions.EXTENSIONS else [])

    monkeypatch.setitem(ALGORITHMS, "timid", (TimidConfig, Timid))  # and taken out again behind the test
    del ALGORITHMS["timid"]
    yield install
    ALGORITHMS.pop("timid", None)


def settings(*more: str) -> list[str]:
    small = ("sim.num_envs=2", "algorithm.decisions=8", "algorithm.batch_size=8", "evaluation.episodes=1")
    return ["task=locomotion/hopper", "policy=gaussian", "algorithm=timid", "budget.updates=1", *small, *more]


def test_an_algorithm_of_another_package_trains_and_is_configured_as_ours(installed: Any, tmp_path: Any) -> None:
    installed("add")
    config = compose_config(settings("algorithm.courage=0.25", f"out={tmp_path}", "name=run"))
    assert config.algorithm["courage"] == 0.25
    start_run(config).train()
    assert load_policy(tmp_path / "run" / "checkpoints" / "last")[0].name == "gaussian"
    with pytest.raises(UserError, match=r"algorithm\.courage must be positive"):
        compose_config(settings("algorithm.courage=-1"))


def test_an_extension_that_fails_is_named(installed: Any) -> None:
    installed("broken")
    reason = r"^broken = .*:broken of robopolicy\.extensions failed: libnothing.so is missing; mend or remove it\.$"
    with pytest.raises(UserError, match=reason):
        compose_config(settings())
