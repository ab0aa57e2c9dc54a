"""Tests of wrappers of several themes around one simulator: order, added observations, and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from foreign_env import check_refuses_a_reserved_name

from robopolicy import plugins
from robopolicy.sim.contract import Step
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.base import unwrapped
from robopolicy.sim.wrappers.registry import WrapperSpec, evaluation_wrappers, is_wrapper_key, wrapped_spec
from robopolicy.training.compose import compose_config, config_text, read_config
from robopolicy_tasks.toy.point_mass import PointMassSim

ALL = (WrapperSpec("skills", {"bonus": 0.1}), WrapperSpec("stock"), WrapperSpec("descriptor"), WrapperSpec("message"))


def test_the_order_of_the_list_does_not_matter() -> None:
    def last_step(wrappers: Sequence[WrapperSpec]) -> Step:
        torch.manual_seed(0)
        sim = make_sim("toy/point_mass", SimOptions(num_envs=3, reward="shaped", wrappers=tuple(wrappers)))
        assert isinstance(unwrapped(sim), PointMassSim)
        sim.reset(0)
        return [sim.step(torch.full((3, 2), 0.5)) for _ in range(3)][-1]

    one, other = last_step(ALL), last_step(ALL[::-1])
    assert torch.equal(one.reward, other.reward) and one.obs.keys() == other.obs.keys()
    assert all(torch.equal(one.obs[key], other.obs[key]) for key in one.obs)


def test_policies_get_the_wrappers_of_their_observations() -> None:
    spec = wrapped_spec(make_sim("toy/point_mass", SimOptions(num_envs=1)).spec, ALL)
    shapes = {key: entry.shape for key, entry in spec.observation.items()}
    assert list(shapes) == ["state", "embedding.skill", "stock.0.99", "descriptor", "message.random"]
    assert observation_options([{"state": (6,)}, shapes]) == {"wrappers": evaluation_wrappers(ALL)}


def test_matching_an_observation_to_its_wrapper_imports_no_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "load", lambda target: pytest.fail(f"{target} was imported"))
    assert [key for key in ("state", "stock.0.9", "stock", "descriptor", "descriptors") if is_wrapper_key(key)] == [
        "stock.0.9",
        "descriptor",
    ]
    assert observation_options([{"state": (6,), "goal": (2,)}]) == {}


def test_a_run_configuration_stores_wrappers_with_all_options(tmp_path: Any) -> None:
    run = ["task=point_mass", "policy=gaussian", "algorithm=ppo", "budget.updates=1"]
    config = compose_config([*run, "task.wrappers=[{name: message, size: 3}, descriptor]"])
    assert config.task.wrappers == (WrapperSpec("message", {"size": 3}), WrapperSpec("descriptor"))
    assert config_text(config).count("  - name: message\n    kind: random\n    size: 3\n  - name: descriptor\n") == 1
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert read_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", ["descriptor", "stock.1", "message.random", "embedding.skill"])
def test_observation_names_of_wrappers_are_reserved(name: str) -> None:
    check_refuses_a_reserved_name(name)
