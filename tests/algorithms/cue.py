"""A task that needs memory: a cue is shown once, and only the last action is paid, by its product with the cue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.seeds import SeedCounter

LENGTH = 5  # steps of an episode
BEST = 1.0  # return of who remembers; 0 is the best without memory


class CueSim(VectorSim):
    """`state`: the cue (+-1) at the first step, 0 later, and the time; `critic`: the cue throughout."""

    def __init__(self, num_envs: int) -> None:
        self.spec = SimSpec(
            task="toy/cue",
            observation={"state": TensorSpec((2,)), "critic": TensorSpec((1,))},
            action_low=-torch.ones(1),
            action_high=torch.ones(1),
            control_dt=0.1,
            max_episode_steps=LENGTH,
        )
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self._seeds = SeedCounter(num_envs)
        self.episode_step = torch.zeros(num_envs, dtype=torch.int64)
        self._cue = torch.zeros(num_envs)

    @property
    def episode_seed(self) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self._seeds.current.copy())

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        self._seeds.reset(seed)
        self._start(torch.ones(self.num_envs, dtype=torch.bool))
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        self.episode_step = self.episode_step + active
        done = active & (self.episode_step >= LENGTH)
        reward = torch.where(done, self._cue * action[:, 0].clamp(-1, 1), 0.0)
        final = self._observe()
        self._start(done)
        return Step(self._observe(), reward, done, torch.zeros_like(done), final)

    def _observe(self) -> Observation:
        shown = torch.where(self.episode_step == 0, self._cue, 0.0)
        return {"state": torch.stack([shown, self.episode_step / LENGTH], 1), "critic": self._cue[:, None].clone()}

    def _start(self, rows: Tensor) -> None:
        if not bool(rows.any()):
            return
        drawn = [
            float(np.random.default_rng(s).choice([-1.0, 1.0])) for s in self._seeds.take(rows.nonzero()[:, 0].numpy())
        ]
        self._cue = self._cue.masked_scatter(rows, torch.tensor(drawn))
        self.episode_step = torch.where(rows, 0, self.episode_step)

    def state_dict(self) -> dict[str, Any]:
        return {"cue": self._cue, "step": self.episode_step, "seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        self._cue, self.episode_step = state["cue"].clone(), state["step"].clone()
        self._seeds.load_state_dict(state["seeds"])
        return self._observe()
