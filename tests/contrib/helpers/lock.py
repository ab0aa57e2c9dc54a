"""Combination lock: one of five actions is correct at every step, and only the last step is rewarded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.batches import Transitions
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.vector_env import TorchVectorEnv

ACTIONS = 5  # equal parts of [-1, 1]


class LockSim(TorchVectorEnv):
    """`state` is the one-hot step, or zeros after a wrong action."""

    def __init__(self, num_envs: int, length: int) -> None:
        spec = SimSpec(
            task="toy/lock",
            observation={"state": TensorSpec((length,))},
            action_low=-torch.ones(1),
            action_high=torch.ones(1),
            control_dt=0.1,
            max_episode_steps=length,
        )
        super().__init__(spec, num_envs)
        self.length = length
        self.code = torch.from_numpy(np.random.default_rng(0).integers(0, ACTIONS, length))
        self._good = torch.ones(num_envs, dtype=torch.bool)

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        self._good = self._good.index_fill(0, rows, True)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = self.active_rows(active)
        correct = self.code[self.episode_step]
        self._good = self._good & (~active | (choice(action[:, 0]) == correct))
        self.episode_step = self.episode_step + active
        done = self.episode_step == self.length
        reward = (done & self._good).float()
        final = self.observe()
        self.restart(done)
        return Step(self.observe(), reward, done, torch.zeros_like(done), final, {"success": reward > 0})

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        self._good = state["good"].clone()
        return super().load_state_dict(state)

    def observe(self) -> Observation:
        code = torch.nn.functional.one_hot(self.episode_step, self.length + 1)[:, : self.length].float()
        return {"state": code * self._good[:, None]}


def choice(action: Tensor) -> Tensor:
    """Index of the action that a number in [-1, 1] encodes."""
    return ((action.clamp(-1, 1) + 1) / 2 * ACTIONS).long().clamp(max=ACTIONS - 1)


def dataset(length: int, episodes: int, wrong: float, gamma: float, generator: torch.Generator) -> Transitions:
    """Windows of one step from a demonstrator that acts at random with probability `wrong`."""
    sim = LockSim(episodes, length)
    obs, columns = sim.reset(0), []
    for step in range(length):
        best = (2 * sim.code[step] + 1) / ACTIONS - 1
        drawn = torch.rand(episodes, generator=generator) * 2 - 1
        near = best + (torch.rand(episodes, generator=generator) - 0.5) * 2 / ACTIONS
        action = torch.where(torch.rand(episodes, generator=generator) < wrong, drawn, near)[:, None]
        done = sim.step(action)
        columns.append((obs["state"], action, done.reward, done.terminated, done.final_obs["state"]))
        obs = done.obs
    state, action, reward, end, after = (torch.cat(column) for column in zip(*columns, strict=True))
    count = len(reward)
    ones = torch.ones(count)
    return Transitions(
        obs={"state": state[:, None]},
        chunk=action[:, None],
        mask=ones[:, None],
        rewards=reward[:, None],
        steps=torch.ones(count, dtype=torch.int64),
        discount=gamma * (~end).float(),
        reward=reward,
        next_obs={"state": after[:, None]},
        returns=torch.full((count,), float("nan")),
        record={},
        online=torch.zeros(count, dtype=torch.bool),
        weight=ones,
        index=torch.arange(count),
    )


def rows(windows: Transitions, index: Tensor) -> Transitions:
    """The windows at `index`."""
    pick: dict[str, Any] = {
        key: {k: v[index] for k, v in value.items()} if isinstance(value, dict) else value[index]
        for key, value in vars(windows).items()
    }
    return Transitions(**pick)
