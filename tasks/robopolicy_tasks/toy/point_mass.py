"""Point mass that must reach a goal: the smallest task, for smoke runs and tests.

Environments are rows of a few torch tensors, so thousands of episodes take a second. State: position, velocity and goal
in the plane; action: acceleration. An episode succeeds and ends within 5 cm of the goal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry, SignedPermutation
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import TorchVectorEnv

STATE_DIM = 6
DT = 0.1  # seconds per control step
RADIUS = 0.05  # [m] maximum distance from the goal for success


class PointMassSim(TorchVectorEnv):
    """N point masses, stepped in torch."""

    def __init__(self, options: SimOptions) -> None:
        """Build `options.num_envs` environments; `options.reward` is "sparse" or "shaped"."""
        options.reject_cameras("toy/point_mass")
        names = ("x [m]", "y [m]", "vx [m/s]", "vy [m/s]", "goal_x [m]", "goal_y [m]")
        spec = SimSpec(
            task="toy/point_mass",
            observation={"state": TensorSpec((STATE_DIM,), names=names)},
            action_low=-torch.ones(2),
            action_high=torch.ones(2),
            control_dt=DT,
            max_episode_steps=40,
            action_names=("ax [m/s^2]", "ay [m/s^2]"),
            mirror=MirrorSymmetry(
                {"state": SignedPermutation.of([-1, 1, -1, 1, -1, 1])}, SignedPermutation.of([-1, 1])
            ),
        )
        super().__init__(spec, options.num_envs, options.device)
        self._shaped = options.reward == "shaped"
        self._state = torch.zeros(self.num_envs, STATE_DIM, device=self.device)  # x, y, vx, vy, goal x, goal y

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Accelerate the masses for one control step."""
        active = self.active_rows(active)
        position, velocity, goal = self._state.split(2, 1)
        velocity = 0.9 * velocity + DT * 4.0 * self.clipped_action(action)
        moved = torch.cat([position + DT * velocity, velocity, goal], 1)
        self._state = torch.where(active[:, None], moved, self._state)
        self.episode_step = self.episode_step + active
        distance = (self._state[:, :2] - goal).norm(dim=1)
        success = active & (distance < RADIUS)
        truncated = active & ~success & (self.episode_step >= self.spec.max_episode_steps)
        reward = success.float() - (0.1 * distance if self._shaped else 0.0)
        final = self.observe()
        self.restart(success | truncated)
        info = {"success": success, "reward.success": success.float()}
        return Step(self.observe(), torch.where(active, reward, 0.0), success, truncated, final, info)

    def observe(self) -> Observation:
        """Position, velocity and goal."""
        return {"state": self._state.clone()}

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Sample positions of masses and goals."""
        starts = np.zeros((len(seeds), STATE_DIM))
        for start, seed in zip(starts, seeds, strict=True):
            start[[0, 1, 4, 5]] = np.random.default_rng(seed).uniform(-1.0, 1.0, 4)
        self._state = self.replaced(self._state, rows, starts)

    def state_dict(self) -> dict[str, Any]:
        """Positions, counters and seeds."""
        return super().state_dict() | {"state": self._state.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._state = state["state"].to(self.device, copy=True)
        return super().load_state_dict(state)


class PointMassExpert:
    """Proportional-derivative controller towards the goal."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return accelerations `(N, 2)`."""
        return steer(obs["state"])


def steer(state: Tensor) -> Tensor:
    """Accelerations `(..., 2)` towards the goal."""
    position, velocity, goal = state.split(2, -1)
    return (3.0 * (goal - position) - 1.5 * velocity).clamp(-1.0, 1.0)


def point_mass_pd(obs: Observation) -> Tensor:
    """Accelerations `(B, 1, 2)` of `PointMassExpert`, for `policy=callable` on this task."""
    size = obs["state"].shape[-1] if "state" in obs else "nothing"
    if size != STATE_DIM:
        raise UserError(
            f"The prior 'point_mass_pd' is for toy/point_mass, whose state has {STATE_DIM} numbers; found {size}."
        )
    return steer(obs["state"][:, -1:])
