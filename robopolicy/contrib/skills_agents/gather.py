"""Rendezvous of point masses: the smallest task with several agents, whose number differs between worlds.

Every row of the simulator is one agent, so that one policy controls all of them by local observations: the agent's
velocity and the set `entities.others` of relative positions and velocities of the others, with zeros in empty slots.
Worlds of 2, 3 and 4 agents alternate (`toy/gather`), or all have 6 (`toy/gather_more`, to evaluate policies among more
agents than in training). A world succeeds and ends when all agents are within 15 cm of their centre; they share the
reward.

A row depends on the actions of others, so seeds do not determine episodes, and single rows cannot be paused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import TorchVectorEnv

DT = 0.1  # [s] per control step
RADIUS = 0.15  # [m] of the circle in which they have to meet
MAX_AGENTS = 6  # maximum agents of a world
SIZES = {"toy/gather": (2, 3, 4), "toy/gather_more": (6,)}
OTHERS = "entities.others"


class GatherSim(TorchVectorEnv):
    """Worlds of point masses, one row per agent, simulated in torch."""

    def __init__(self, task: str, options: SimOptions) -> None:
        """Fill `options.num_envs` rows with worlds of alternating sizes; the last one may be smaller."""
        options.reject_cameras(task)
        spec = SimSpec(
            task=task,
            observation={
                "velocity": TensorSpec((2,), names=("vx [m/s]", "vy [m/s]")),
                OTHERS: TensorSpec((MAX_AGENTS - 1, 4), names=("x [m]", "y [m]", "vx [m/s]", "vy [m/s]")),
            },
            action_low=-torch.ones(2),
            action_high=torch.ones(2),
            control_dt=DT,
            max_episode_steps=60,
            action_names=("ax [m/s^2]", "ay [m/s^2]"),
            seeded_episodes=False,
            supports_masked_step=False,
        )
        super().__init__(spec, options.num_envs)
        self.world = assign_worlds(self.num_envs, SIZES[task])  # (N,) of each agent
        self._together = self.world[:, None] == self.world[None]  # (N, N)
        self._shaped = options.reward == "shaped"
        self._state = torch.zeros(self.num_envs, 4)  # x, y, vx, vy

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Accelerate the masses for one control step; all rows move."""
        position, velocity = self._state.split(2, 1)
        velocity = 0.9 * velocity + DT * 4.0 * self.clipped_action(action)
        self._state = torch.cat([position + DT * velocity, velocity], 1)
        self.episode_step = self.episode_step + 1
        distance = (self._state[:, :2] - self._mean(self._state[:, :2])).norm(dim=1)
        met = self._mean((distance < RADIUS).float()[:, None])[:, 0] > 1 - 1e-4  # all of the world
        success = met & (self._together.sum(1) > 1)
        truncated = ~success & (self.episode_step >= self.spec.max_episode_steps)
        reward = success.float() - (0.1 * self._mean(distance[:, None])[:, 0] if self._shaped else 0.0)
        final = self.observe()
        self.restart(success | truncated)
        return Step(self.observe(), reward, success, truncated, final, {"success": success})

    def observe(self) -> Observation:
        """Observation of each agent: its velocity, and the relative states of the others in its world."""
        others = torch.zeros(self.num_envs, MAX_AGENTS - 1, 4)
        for row in range(self.num_envs):
            visible = self._together[row].clone()
            visible[row] = False
            relative = self._state[visible] - torch.cat([self._state[row, :2], torch.zeros(2)])
            others[row, : len(relative)] = relative
        return {"velocity": self._state[:, 2:].clone(), OTHERS: others}

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Draw positions of masses at rest."""
        state = self._state.clone()
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            draws = np.random.default_rng(seed).uniform(-1.0, 1.0, 2)
            state[row] = torch.tensor([*draws, 0.0, 0.0], dtype=torch.float32)
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Positions, counters and seeds."""
        return super().state_dict() | {"state": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._state = state["state"].clone()
        return super().load_state_dict(state)

    def _mean(self, values: Tensor) -> Tensor:
        """Means `(N, D)` over each agent's world."""
        shares = self._together.float() / self._together.sum(1, keepdim=True)
        return shares @ values


class GatherExpert:
    """Proportional-derivative controller towards the centre of all visible agents, including the agent itself."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return accelerations `(N, 2)`."""
        others = obs[OTHERS]
        count = (others != 0).any(-1).sum(1, keepdim=True)
        centre = others[..., :2].sum(1) / (count + 1)
        return (3.0 * centre - 1.5 * obs["velocity"]).clamp(-1.0, 1.0)


def assign_worlds(agents: int, sizes: Sequence[int]) -> Tensor:
    """World index `(N,)` of each agent for alternating world sizes; the last world is never a single agent."""
    numbers: list[int] = []
    while len(numbers) < agents:
        number = numbers[-1] + 1 if numbers else 0
        numbers += [number] * min(sizes[number % len(sizes)], agents - len(numbers))
    last = numbers[-1]
    if last and numbers.count(last) == 1:  # take an agent from the previous world, or join it
        if numbers.count(last - 1) > 2:
            numbers[-2] = last
        else:
            numbers[-1] = last - 1
    return torch.tensor(numbers)


def make_gather(options: SimOptions) -> GatherSim:
    """Simulator of `toy/gather`."""
    return GatherSim("toy/gather", options)


def make_gather_more(options: SimOptions) -> GatherSim:
    """Simulator of `toy/gather_more`."""
    return GatherSim("toy/gather_more", options)
