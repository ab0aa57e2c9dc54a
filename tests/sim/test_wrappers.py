"""Simulator wrappers by name: options, order, what they add for policies, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy import plugins
from robopolicy.constraints import Positive, Ranged
from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.base import SimWrapper, innermost
from robopolicy.sim.wrappers.registry import (
    WRAPPER_KEYS,
    WRAPPERS,
    WrapperSpec,
    evaluation_wrappers,
    is_wrapper_key,
    wrapped_spec,
)
from robopolicy.training.compose import compose_config, config_text, read_config
from robopolicy_tasks.toy.point_mass import PointMassSim

ALL = (WrapperSpec("skills", {"bonus": 0.1}), WrapperSpec("stock"), WrapperSpec("descriptor"), WrapperSpec("message"))


@dataclass(frozen=True)
class ScaleConfig(Ranged):
    factor: Positive = 2.0


class ScaledReward(SimWrapper):
    """A wrapper of another package: scales rewards in training and shows the factor."""

    name = "scaled"
    config_class = ScaleConfig

    def __init__(self, sim: Any, config: ScaleConfig) -> None:
        super().__init__(sim, config)
        self.factor = config.factor

    @classmethod
    def observation(cls, spec: SimSpec, config: ScaleConfig) -> dict[str, TensorSpec]:
        return {"scale": TensorSpec((1,))}

    @classmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        return {} if "scale" in observation else None

    @classmethod
    def evaluation_config(cls, config: ScaleConfig) -> None:
        return None

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        return self._with(self.sim.reset(seed))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.sim.step(action, active)
        return replace(
            step, obs=self._with(step.obs), final_obs=self._with(step.final_obs), reward=self.factor * step.reward
        )

    def _with(self, obs: Observation) -> Observation:
        return {**obs, "scale": torch.full((self.num_envs, 1), self.factor)}


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRAPPERS._rows, "scaled", ScaledReward)
    monkeypatch.setitem(WRAPPER_KEYS._rows, "scale", ScaledReward)


def test_the_order_of_the_list_does_not_matter() -> None:
    def played(wrappers: Sequence[WrapperSpec]) -> Step:
        torch.manual_seed(0)
        sim = make_sim("toy/point_mass", SimOptions(num_envs=3, reward="shaped", wrappers=tuple(wrappers)))
        assert isinstance(innermost(sim), PointMassSim)
        sim.reset(0)
        return [sim.step(torch.full((3, 2), 0.5)) for _ in range(3)][-1]

    one, other = played(ALL), played(ALL[::-1])
    assert torch.equal(one.reward, other.reward) and one.obs.keys() == other.obs.keys()
    assert all(torch.equal(one.obs[key], other.obs[key]) for key in one.obs)


def test_policies_get_the_wrappers_that_add_what_they_observe() -> None:
    spec = wrapped_spec(make_sim("toy/point_mass", SimOptions(num_envs=1)).spec, ALL)
    shapes = {key: entry.shape for key, entry in spec.observation.items()}
    assert list(shapes) == ["state", "embedding.skill", "stock.0.99", "descriptor", "message.random"]
    assert observation_options([{"state": (6,)}, shapes]) == {"wrappers": evaluation_wrappers(ALL)}


def test_no_wrapper_is_imported_to_tell_whose_an_observation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "load", lambda target: pytest.fail(f"{target} was imported"))
    assert [key for key in ("state", "stock.0.9", "stock", "descriptor", "descriptors") if is_wrapper_key(key)] == [
        "stock.0.9",
        "descriptor",
    ]
    assert observation_options([{"state": (6,), "goal": (2,)}]) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[stok]", "Unknown wrapper 'stok'. Did you mean 'stock'?"),
        ("[{name: stock, discont: 0.9}]", "Unknown setting 'discont' in wrappers.stock. Did you mean 'discount'?"),
        ("[{name: stock, discount: high}]", "wrappers.stock.discount must be a value of type float, found 'high'."),
        ("[{discount: 0.9}]", "task.wrappers[0] must be a wrapper, NAME or {name: NAME, OPTION: VALUE}"),
        ("stock", "task.wrappers: expected a list"),
    ],
)
def test_wrong_settings_get_one_clear_line(value: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose_config([f"task.wrappers={value}"])
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_a_wrapper_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(UserError, match="'stock' is listed twice"):
        make_sim("toy/point_mass", SimOptions(num_envs=1, wrappers=(WrapperSpec("stock"), WrapperSpec("stock"))))


def test_a_run_keeps_its_wrappers_with_all_options(tmp_path: Any) -> None:
    run = ["task=point_mass", "policy=gaussian", "algorithm=ppo", "budget.updates=1"]
    config = compose_config([*run, "task.wrappers=[{name: message, size: 3}, descriptor]"])
    assert config.task.wrappers == (WrapperSpec("message", {"size": 3}), WrapperSpec("descriptor"))
    assert config_text(config).count("  - name: message\n    kind: random\n    size: 3\n  - name: descriptor\n") == 1
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert read_config(tmp_path / "config.yaml") == config


@pytest.mark.usefixtures("scaled")
def test_a_wrapper_of_another_package_is_chosen_as_ours() -> None:
    wrapper = WrapperSpec("scaled", {"factor": 3})
    sim = make_sim("toy/point_mass", SimOptions(num_envs=2, reward="shaped", wrappers=(wrapper,)))
    plain = make_sim("toy/point_mass", SimOptions(num_envs=2, reward="shaped"))
    assert sim.reset(0)["scale"].tolist() == [[3.0], [3.0]]
    plain.reset(0)
    action = torch.ones(2, 2)
    assert torch.equal(sim.step(action).reward, 3 * plain.step(action).reward)
    assert evaluation_wrappers([wrapper]) == ()
    assert observation_options([{"scale": (1,)}]) == {"wrappers": (WrapperSpec("scaled"),)}
    with pytest.raises(UserError, match=r"wrappers\.scaled\.factor must be positive"):
        WrapperSpec("scaled", {"factor": 0.0})
