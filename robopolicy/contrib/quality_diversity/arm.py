"""Planar arm whose hand position is the behavior: the smallest task for archives of diverse policies.

Eight links of equal length, together 1 m, start stretched along x with a little noise. The action is the velocity of
every joint. The reward is 1 minus the mean squared action, so a resting arm gets the most. The behavior of an episode
is the final position of the hand: the best solution for a point turns all joints a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import TorchVectorEnv

LINKS = 8
DT = 0.1  # seconds per control step
NOISE = 0.01  # [rad], half width of the uniform start noise
STEPS = 20  # control steps per episode


class ArmSim(TorchVectorEnv):
    """N arms, simulated in torch."""

    def __init__(self, options: SimOptions) -> None:
        """Build `options.num_envs` environments."""
        options.reject_cameras("toy/arm")
        names = (*(f"joint{i} [rad]" for i in range(LINKS)), "time [share of the episode]")
        spec = SimSpec(
            task="toy/arm",
            observation={"state": TensorSpec((LINKS + 1,), names=names)},
            action_low=-torch.ones(LINKS),
            action_high=torch.ones(LINKS),
            control_dt=DT,
            max_episode_steps=STEPS,
            action_names=tuple(f"joint{i} [rad/s]" for i in range(LINKS)),
        )
        super().__init__(spec, options.num_envs, options.device)
        self._angles = torch.zeros(self.num_envs, LINKS, device=self.device)  # relative to the link before

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Turn the joints for one control step."""
        active = self.active_rows(active)
        action = self.clipped_action(action)
        self._angles = torch.where(active[:, None], self._angles + DT * action, self._angles)
        self.episode_step = self.episode_step + active
        truncated = active & (self.episode_step >= self.spec.max_episode_steps)
        final = self.observe()
        self.restart(truncated)
        return Step(
            obs=self.observe(),
            reward=torch.where(active, 1 - action.square().mean(1), 0.0),
            terminated=torch.zeros_like(truncated),
            truncated=truncated,
            final_obs=final,
        )

    def observe(self) -> Observation:
        """Joint angles and the elapsed fraction of the episode."""
        passed = self.episode_step[:, None] / self.spec.max_episode_steps
        return {"state": torch.cat([self._angles, passed], 1)}

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Reset arms to the stretched pose with noise."""
        starts = np.stack([np.random.default_rng(seed).uniform(-NOISE, NOISE, LINKS) for seed in seeds])
        self._angles = self.replaced(self._angles, rows, starts)

    def state_dict(self) -> dict[str, Any]:
        """Angles, counters and seeds."""
        return super().state_dict() | {"angles": self._angles.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._angles = state["angles"].to(self.device, copy=True)
        return super().load_state_dict(state)
