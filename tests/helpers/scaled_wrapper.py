"""A wrapper of another package, registered by the fixture `scaled`: scales rewards and observes the factor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.constraints import Positive, Validated
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.wrappers.base import SimWrapper
from robopolicy.sim.wrappers.registry import WRAPPER_KEYS, WRAPPERS


@dataclass(frozen=True)
class ScaleConfig(Validated):
    factor: Positive = 2.0


class ScaledReward(SimWrapper):
    """A wrapper of another package: scales rewards in training and observes the factor."""

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
