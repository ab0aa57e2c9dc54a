"""Tests of algorithms from installed packages: found by name, configured and trained like the built-in ones."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from robopolicy import plugins
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli.list import algorithms as listed_algorithms
from robopolicy.errors import UserError
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.compose import compose_config
from robopolicy.training.runs import start_run


@dataclass(frozen=True)
class TimidConfig(PPOConfig):
    """PPO with a setting of its own."""

    courage: float = 0.5  # nothing reads it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.courage <= 0:
            raise ValueError(f"courage must be positive, got {self.courage}")


class Timid(PPO):
    """PPO under another name."""

    name = "timid"
    config_class = TimidConfig
    config: TimidConfig


class Shy(Timid):
    """Sets no class attribute of its own."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers an entry point for the duration of a test."""
    found = dict(plugins.installed("algorithms"))
    original = plugins.installed
    monkeypatch.setattr(plugins, "installed", lambda kind: found if kind == "algorithms" else original(kind))

    def add(name: str, value: str) -> None:
        found[name] = EntryPoint(name, value, "robopolicy.algorithms")

    return add


def settings(*more: str) -> list[str]:
    small = ("sim.num_envs=2", "algorithm.num_steps=8", "algorithm.batch_size=8", "evaluation.episodes=1")
    return ["task=locomotion/hopper", "policy=gaussian", "algorithm=timid", "budget.updates=1", *small, *more]


def test_algorithm_of_another_package_is_configured_and_trained(install: Any, tmp_path: Any) -> None:
    install("timid", f"{__name__}:Timid")
    assert "timid" in list(ALGORITHMS)
    assert ALGORITHMS.summary("timid") == "PPO under another name."
    config = compose_config(settings("algorithm.courage=0.25", f"out={tmp_path}", "name=run"))
    assert config.algorithm["courage"] == 0.25
    start_run(config).train()
    assert load_policy(tmp_path / "run" / "checkpoints" / "last")[0].name == "gaussian"
    with pytest.raises(UserError, match="courage must be positive"):
        compose_config(settings("algorithm.courage=-1"))


def test_entry_point_that_cannot_be_imported_is_named_on_use(install: Any) -> None:
    install("timid", "missing_package.timid:Timid")
    assert "timid" in ALGORITHMS  # listing names imports nothing
    with pytest.raises(
        UserError, match=r"^timid = missing_package.timid:Timid of robopolicy.algorithms failed: No module"
    ):
        compose_config(settings())


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithms 'ppo' is already registered"):
        ALGORITHMS.register("ppo", PPO)


def test_summaries_are_read_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise AssertionError(module)

    monkeypatch.setattr(plugins.importlib, "import_module", refuse)
    assert all(ALGORITHMS.summary(name).endswith(".") for name in ALGORITHMS.product())
    assert ALGORITHMS.attribute("ppo", "data_source") == "rollout"
    assert all(row["data"].endswith(".") for row in listed_algorithms())


def test_class_attributes_are_inherited_from_bases() -> None:
    assert plugins.class_attribute(f"{__name__}:Shy", "name") == "timid"
    assert plugins.class_attribute(f"{__name__}:Shy", "heads") == PPO.heads
    with pytest.raises(ValueError, match="set no constant 'courage'"):
        plugins.class_attribute(f"{__name__}:Shy", "courage")


def test_training_loop_imports_no_algorithm() -> None:
    program = "import sys, robopolicy.training.loop; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    packages = {"robopolicy.algorithms", "robopolicy.algorithms.common"}
    imported = {name for name in found if name.startswith("robopolicy.algorithms")} - packages
    assert imported == {"robopolicy.algorithms.registry", "robopolicy.algorithms.common.algorithm"}
