"""A task that needs memory: the cue is visible once; the reward is the product of the last action and the cue."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.vector_env import TorchVectorEnv

LENGTH = 5  # steps of an episode
BEST = 1.0  # optimal return with memory; 0 without


class CueSim(TorchVectorEnv):
    """`state`: the cue (+-1) at the first step, 0 later, and the time; `critic`: the cue at every step."""

    def __init__(self, num_envs: int) -> None:
        spec = SimSpec(
            task="toy/cue",
            observation={"state": TensorSpec((2,)), "critic": TensorSpec((1,))},
            action_low=-torch.ones(1),
            action_high=torch.ones(1),
            control_dt=0.1,
            max_episode_steps=LENGTH,
        )
        super().__init__(spec, num_envs)
        self._cue = torch.zeros(num_envs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = self.active_rows(active)
        self.episode_step = self.episode_step + active
        done = active & (self.episode_step >= LENGTH)
        reward = torch.where(done, self._cue * action[:, 0].clamp(-1, 1), 0.0)
        final = self.observe()
        self.restart(done)
        return Step(self.observe(), reward, done, torch.zeros_like(done), final)

    def observe(self) -> Observation:
        shown = torch.where(self.episode_step == 0, self._cue, 0.0)
        return {"state": torch.stack([shown, self.episode_step / LENGTH], 1), "critic": self._cue[:, None].clone()}

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        drawn = [float(np.random.default_rng(seed).choice([-1.0, 1.0])) for seed in seeds]
        self._cue = self._cue.index_copy(0, rows, torch.tensor(drawn))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"cue": self._cue}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        self._cue = state["cue"].clone()
        return super().load_state_dict(state)
