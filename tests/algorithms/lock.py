"""The combination lock: one of five actions leads on at every step, only the last step is paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.transitions import Transitions
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.seeds import SeedCounter

ACTIONS = 5  # equal parts of [-1, 1]


class LockSim(VectorSim):
    """`state`: one-hot of the step, zeros once a wrong action was played."""

    def __init__(self, num_envs: int, length: int) -> None:
        self.spec = SimSpec(
            task="toy/lock",
            observation={"state": TensorSpec((length,))},
            action_low=-torch.ones(1),
            action_high=torch.ones(1),
            control_dt=0.1,
            max_episode_steps=length,
        )
        self.length = length
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self._seeds = SeedCounter(num_envs)
        self.code = torch.from_numpy(np.random.default_rng(0).integers(0, ACTIONS, length))
        self.episode_step = torch.zeros(num_envs, dtype=torch.int64)
        self._good = torch.ones(num_envs, dtype=torch.bool)

    @property
    def episode_seed(self) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self._seeds.current.copy())

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        self._seeds.reset(seed)
        self._seeds.take(np.arange(self.num_envs))
        self.episode_step, self._good = torch.zeros_like(self.episode_step), torch.ones_like(self._good)
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones_like(self._good) if active is None else active
        wanted = self.code[self.episode_step]
        self._good = self._good & (~active | (choice(action[:, 0]) == wanted))
        self.episode_step = self.episode_step + active
        done = self.episode_step == self.length
        reward = (done & self._good).float()
        final = self._observe()
        self._seeds.take(done.nonzero()[:, 0].numpy())
        self.episode_step, self._good = torch.where(done, 0, self.episode_step), self._good | done
        return Step(self._observe(), reward, done, torch.zeros_like(done), final, {"success": reward > 0})

    def state_dict(self) -> dict[str, Any]:
        return {"good": self._good, "step": self.episode_step, "seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        self._good, self.episode_step = state["good"].clone(), state["step"].clone()
        self._seeds.load_state_dict(state["seeds"])
        return self._observe()

    def _observe(self) -> Observation:
        code = torch.nn.functional.one_hot(self.episode_step, self.length + 1)[:, : self.length].float()
        return {"state": code * self._good[:, None]}


def choice(action: Tensor) -> Tensor:
    """Which of the actions a number in [-1, 1] is."""
    return ((action.clamp(-1, 1) + 1) / 2 * ACTIONS).long().clamp(max=ACTIONS - 1)


def dataset(length: int, episodes: int, wrong: float, gamma: float, generator: torch.Generator) -> Transitions:
    """Windows of one step from a demonstrator that plays at random with probability `wrong`."""
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
    """Some of the windows."""
    pick: dict[str, Any] = {
        key: {k: v[index] for k, v in value.items()} if isinstance(value, dict) else value[index]
        for key, value in vars(windows).items()
    }
    return Transitions(**pick)
