"""Simulator wrappers by name: options, order, what they add for policies, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.constraints import Positive, Ranged
from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.base import SimWrapper
from robopolicy.sim.wrappers.registry import (
    WRAPPER_KEYS,
    WRAPPERS,
    WrapperSpec,
    evaluation_wrappers,
)
from robopolicy.training.compose import compose_config


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


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[scald]", "Unknown wrapper 'scald'. Did you mean 'scaled'?"),
        ("[{name: scaled, facto: 0.9}]", "Unknown setting 'facto' in wrappers.scaled. Did you mean 'factor'?"),
        ("[{name: scaled, factor: high}]", "wrappers.scaled.factor must be a value of type float, found 'high'."),
        ("[{factor: 0.9}]", "task.wrappers[0] must be a wrapper, NAME or {name: NAME, OPTION: VALUE}"),
        ("scaled", "task.wrappers: expected a list"),
    ],
)
def test_wrong_settings_get_one_clear_line(value: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose_config([f"task.wrappers={value}"])
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.usefixtures("scaled")
def test_a_wrapper_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(UserError, match="'scaled' is listed twice"):
        make_sim("toy/point_mass", SimOptions(num_envs=1, wrappers=(WrapperSpec("scaled"), WrapperSpec("scaled"))))


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
