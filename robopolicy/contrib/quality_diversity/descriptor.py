"""Simulator wrapper that sets a target descriptor per episode and measures the achieved one.

The target *descriptor* of an episode is drawn from its seed, uniform in [0, 1] per feature of the task's behavior
(`behaviors.py`), and is the observation `descriptor` `(D,)`. At the end of the episode, `info["descriptor"]` `(N, D)`
contains the achieved descriptor, and `log.descriptor_error` the distance between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robopolicy.contrib.quality_diversity.behavior import DESCRIPTOR, BehaviorDescriptor
from robopolicy.contrib.quality_diversity.behaviors import BEHAVIORS
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.contract import LOG_PREFIX, Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.wrappers.base import SimWrapper, unwrapped

FEATURES = "behavior"
"""Key of `Step.info` with the features `(N, D)` of a control step, for features of the MuJoCo state."""

_STREAM = 7_204_801  # separates the draws of descriptors from the draws of the task, which use the same seeds


@dataclass(frozen=True)
class DescriptorConfig:
    """Options of the wrapper `descriptor`; it has none."""


class DescriptorSim(SimWrapper):
    """Adds the observation `descriptor` to another simulator."""

    name = "descriptor"
    config_class = DescriptorConfig
    order: ClassVar[int] = 30

    def __init__(self, sim: VectorSim, config: DescriptorConfig) -> None:
        """Wrap `sim`.

        Raises:
            UserError: The task has no behavior descriptor on this backend.
        """
        super().__init__(sim, config)
        behavior, inner = BEHAVIORS[sim.spec.task], unwrapped(sim)
        self.behavior, self._of_step = behavior.descriptor, behavior.of_step
        if behavior.of_state is not None:
            if not isinstance(inner, MujocoSim):
                raise _unmeasured(sim.spec.task)
            inner.measurements[FEATURES] = behavior.of_state
        self._target = torch.zeros(self.num_envs, self.behavior.size, device=self.device)
        self._sum = torch.zeros_like(self._target)  # of the features in the running episodes

    @classmethod
    def observation(cls, spec: SimSpec, config: DescriptorConfig) -> dict[str, TensorSpec]:
        """`descriptor` `(D,)`: the target of the episode."""
        if spec.task not in BEHAVIORS:
            raise _unmeasured(spec.task)
        behavior = BEHAVIORS[spec.task].descriptor
        return {DESCRIPTOR: TensorSpec((behavior.size,), names=tuple(f"wanted {name}" for name in behavior.names))}

    @classmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        """No options, for a policy that observes a descriptor."""
        return {} if DESCRIPTOR in observation else None

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Restart all environments."""
        obs = self.sim.reset(seed)
        self._target, self._sum = self._targets(), torch.zeros_like(self._sum)
        return self._with(obs, self._target)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator and measure the behavior."""
        length = self.sim.episode_step + 1
        step = self.sim.step(action, active)
        feature = self._features(step)
        if active is not None:
            feature = torch.where(active[:, None].to(feature.device), feature, 0.0)
        self._sum = self._sum + feature
        summary = self._sum / length[:, None] if self.behavior.summary == "mean" else feature
        found = self.behavior.normalize(summary)
        error = (found - self._target).norm(dim=1)
        info = step.info | {DESCRIPTOR: found, f"{LOG_PREFIX}descriptor_error": error}
        before, done = self._target, step.done[:, None]
        if bool(done.any()):
            self._target = torch.where(done, self._targets(), self._target)
            self._sum = torch.where(done, 0.0, self._sum)
        return replace(
            step, obs=self._with(step.obs, self._target), final_obs=self._with(step.final_obs, before), info=info
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the simulator, target descriptors and sums of features."""
        return {**super().state_dict(), "wanted": self._target, "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._target, self._sum = state["wanted"].to(self.device), state["sum"].to(self.device)
        return self._with(super().load_state_dict(state), self._target)

    def _features(self, step: Step) -> Tensor:
        """Features `(N, D)` of a step; zeros from a MuJoCo simulator in which no row moved."""
        if self._of_step is not None:
            return self._of_step(step).float()
        return step.info.get(FEATURES, torch.zeros_like(self._sum)).float()

    def _targets(self) -> Tensor:
        """Target descriptors `(N, D)` of the running episodes, determined by their seeds."""
        return target_descriptors(self.sim.episode_seed, self.behavior).to(self.device)

    def _with(self, obs: Observation, target: Tensor) -> Observation:
        return {**obs, DESCRIPTOR: target.clone()}


def target_descriptors(seeds: Tensor, behavior: BehaviorDescriptor) -> Tensor:
    """Target descriptors `(N, D)` of the episodes `seeds` `(N,)`."""
    rows = [np.random.default_rng([seed, _STREAM]).random(behavior.size) for seed in seeds.tolist()]
    return torch.from_numpy(np.stack(rows)).float()


def _unmeasured(task: str) -> UserError:
    return UserError(
        f"Task {task} has no behavior descriptor on this backend; drop the wrapper 'descriptor', or choose another "
        "task or backend, e.g. locomotion/half_cheetah on 'mujoco'."
    )
