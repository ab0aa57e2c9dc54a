"""A simulator that says which behaviour is wanted, and measures the one that was shown.

Every episode asks for a *descriptor* drawn from its seed, uniform in [0, 1] per feature of the task's `Behaviour`, and
shows it as the observation `descriptor` `(D,)`. When the episode ends, `info["descriptor"]` `(N, D)` holds what was
shown instead, and `log.descriptor_error` how far that is from what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.behaviour import BEHAVIOUR, Behaviour
from robopolicy.errors import UserError
from robopolicy.sim.contract import LOG_PREFIX, Observation, Step, TensorSpec, VectorSim
from robopolicy.sim.wrapped import WrappedSim
from robopolicy.spec import DESCRIPTOR

_STREAM = 7_204_801  # keeps the draws of descriptors apart from those of the task, which come from the same seeds


class DescriptorSim(WrappedSim):
    """Another simulator and the observation `descriptor`."""

    def __init__(self, sim: VectorSim) -> None:
        """Wrap `sim`.

        Raises:
            UserError: It measures no behaviour.
        """
        if sim.spec.behaviour is None:
            raise UserError(
                f"Task {sim.spec.task} measures no behaviour on this backend; drop task.descriptor, or choose a task "
                "and a backend that do, e.g. locomotion/half_cheetah on 'mujoco'."
            )
        self.behaviour = sim.spec.behaviour
        names = tuple(f"wanted {name}" for name in self.behaviour.names)
        super().__init__(sim, DESCRIPTOR, TensorSpec((self.behaviour.size,), names=names))
        self._wanted = torch.zeros(self.num_envs, self.behaviour.size, device=self.device)
        self._sum = torch.zeros_like(self._wanted)  # of the features in the running episodes

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every environment anew."""
        obs = self.sim.reset(seed)
        self._wanted, self._sum = self._drawn(), torch.zeros_like(self._sum)
        return self._with(obs, self._wanted)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator and follow the behaviour."""
        length = self.sim.episode_step + 1
        step = self.sim.step(action, active)
        feature = step.info.get(BEHAVIOUR, torch.zeros_like(self._sum)).float()  # nothing where nobody moved
        if active is not None:
            feature = torch.where(active[:, None].to(feature.device), feature, 0.0)
        self._sum = self._sum + feature
        summary = self._sum / length[:, None] if self.behaviour.summary == "mean" else feature
        found = self.behaviour.descriptor(summary)
        error = (found - self._wanted).norm(dim=1)
        info = step.info | {DESCRIPTOR: found, f"{LOG_PREFIX}descriptor_error": error}
        before, done = self._wanted, step.done[:, None]
        if bool(done.any()):
            self._wanted = torch.where(done, self._drawn(), self._wanted)
            self._sum = torch.where(done, 0.0, self._sum)
        return replace(
            step, obs=self._with(step.obs, self._wanted), final_obs=self._with(step.final_obs, before), info=info
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the simulator, what is wanted and what has been shown so far."""
        return {**super().state_dict(), "wanted": self._wanted, "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._wanted, self._sum = state["wanted"].to(self.device), state["sum"].to(self.device)
        return self._with(super().load_state_dict(state), self._wanted)

    def _drawn(self) -> Tensor:
        """What the running episodes ask for `(N, D)`, a function of their seeds."""
        return wanted(self.sim.episode_seed, self.behaviour).to(self.device)

    def _with(self, obs: Observation, wanted: Tensor) -> Observation:
        return {**obs, DESCRIPTOR: wanted.clone()}


def wanted(seeds: Tensor, behaviour: Behaviour) -> Tensor:
    """Descriptors `(N, D)` that the episodes `seeds` `(N,)` ask for."""
    rows = [np.random.default_rng([seed, _STREAM]).random(behaviour.size) for seed in seeds.tolist()]
    return torch.from_numpy(np.stack(rows)).float()
