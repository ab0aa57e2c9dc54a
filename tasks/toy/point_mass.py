"""A point mass that has to reach a goal: the smallest task on the contract, for smoke runs and tests.

All environments are rows of a few torch tensors, so thousands of episodes take a second. State: position, velocity and
goal in the plane; action: acceleration. Success, and the end of the episode, is being within 5 cm of the goal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.mirror import Mirror, Reflection
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.seeds import SeedCounter

DT = 0.1  # seconds per control step
RADIUS = 0.05  # metres around the goal that count as success


class PointMassSim(VectorSim):
    """N point masses, stepped in torch."""

    def __init__(self, options: SimOptions) -> None:
        """Build `options.num_envs` environments; `options.reward` is "sparse" or "shaped"."""
        if options.cameras or options.point_clouds:
            raise UserError("Task toy/point_mass has no cameras; leave them out.")
        names = ("x [m]", "y [m]", "vx [m/s]", "vy [m/s]", "goal_x [m]", "goal_y [m]")
        self.spec = SimSpec(
            task="toy/point_mass",
            observation={"state": TensorSpec((6,), names=names)},
            action_low=-torch.ones(2),
            action_high=torch.ones(2),
            control_dt=DT,
            max_episode_steps=40,
            action_names=("ax [m/s^2]", "ay [m/s^2]"),
            mirror=Mirror({"state": Reflection.of([-1, 1, -1, 1, -1, 1])}, Reflection.of([-1, 1])),
        )
        self.num_envs = options.num_envs
        self.device = torch.device("cpu")
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)
        self._shaped = options.reward == "shaped"
        self._seeds = SeedCounter(self.num_envs)
        self._state = torch.zeros(self.num_envs, 6)  # x, y, vx, vy, goal x, goal y

    @property
    def episode_seed(self) -> Tensor:  # type: ignore[override]
        """(N,) seeds of the episodes now running."""
        return torch.from_numpy(self._seeds.current.copy())

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every environment anew."""
        self._seeds.reset(seed)
        self._start(torch.ones(self.num_envs, dtype=torch.bool))
        return {"state": self._state.clone()}

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Accelerate the masses for one control step."""
        if active is None:
            active = torch.ones(self.num_envs, dtype=torch.bool)
        position, velocity, goal = self._state.split(2, 1)
        velocity = 0.9 * velocity + DT * 4.0 * action.clamp(-1.0, 1.0)
        moved = torch.cat([position + DT * velocity, velocity, goal], 1)
        self._state = torch.where(active[:, None], moved, self._state)
        self.episode_step = self.episode_step + active
        distance = (self._state[:, :2] - goal).norm(dim=1)
        success = active & (distance < RADIUS)
        truncated = active & ~success & (self.episode_step >= self.spec.max_episode_steps)
        reward = success.float() - (0.1 * distance if self._shaped else 0.0)
        final = self._state.clone()
        self._start(success | truncated)
        return Step(
            obs={"state": self._state.clone()},
            reward=torch.where(active, reward, 0.0),
            terminated=success,
            truncated=truncated,
            final_obs={"state": final},
            info={"success": success, "reward.success": success.float()},
        )

    def _start(self, rows: Tensor) -> None:
        indices = rows.nonzero().flatten()
        if not len(indices):
            return
        state = self._state.clone()
        for index, seed in zip(indices.tolist(), self._seeds.take(indices.numpy()), strict=True):
            draws = np.random.default_rng(seed).uniform(-1.0, 1.0, 4)
            state[index] = torch.tensor([*draws[:2], 0.0, 0.0, *draws[2:]], dtype=torch.float32)
        self._state = state
        self.episode_step = torch.where(rows, 0, self.episode_step)

    def state_dict(self) -> dict[str, Any]:
        """Positions, counters and seeds."""
        return {"state": self._state, "step": self.episode_step, "seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._state, self.episode_step = state["state"].clone(), state["step"].clone()
        self._seeds.load_state_dict(state["seeds"])
        return {"state": self._state.clone()}


class PointMassExpert:
    """Proportional-derivative controller towards the goal."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return accelerations `(N, 2)`."""
        return steer(obs["state"])


def steer(state: Tensor) -> Tensor:
    """Accelerations `(..., 2)` towards the goal."""
    position, velocity, goal = state.split(2, -1)
    return (3.0 * (goal - position) - 1.5 * velocity).clamp(-1.0, 1.0)
