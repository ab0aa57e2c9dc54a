"""A rail with hand-computable numbers and the interface of each environment that `IsaacStyleSim` accepts.

x += action; the reward is x; x > 5 terminates, the fourth step truncates. The k-th restart of a row starts at 0.01 k.

    action 2.0: x = 2, 4, 6            terminated after 3 steps
    action 1.0: x = 1, 2, 3, 4         truncated after 4 steps
    action 1.5: x = 1.5, 3, 4.5, 6     both flags after 4 steps
"""

import math
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

# old: Isaac Lab 2.3, without final observations; fast: mjlab with its own reset, which hides them
KINDS = ("mjlab", "fast mjlab", "manager", "direct", "old manager", "old direct")


class Rail:
    """N rows of the rail; flags, rewards and observations are views of storage that every step overwrites."""

    max_episode_length = 4
    step_dt = 0.5

    def __init__(self, kind: str, num_envs: int = 3, *, noise: float = 0.0, device: str = "cpu") -> None:
        self.kind, self.num_envs, self.noise, self.device = kind, num_envs, noise, device
        self.unwrapped = self
        self.cfg = SimpleNamespace()
        box: Any = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.is_mjlab = "mjlab" in kind
        if self.is_mjlab:
            self.cfg.auto_reset = True
            box = SimpleNamespace(shape=(1,), low=-math.inf, high=math.inf)
        elif "old" not in kind:
            self.cfg.compute_final_obs = True
        self.single_action_space = box
        self.scene = SimpleNamespace(write_data_to_sim=lambda: None)
        self.sim = SimpleNamespace(forward=lambda: None)
        if "direct" not in kind:
            self.observation_manager = SimpleNamespace(compute=self._get_observations)
            self.termination_manager = SimpleNamespace(active_terms=["success"], get_term=lambda name: self.won)
        self.x, self.age, self.starts, self.reward, self.played = (
            torch.zeros(num_envs, device=device) for _ in range(5)
        )
        self.terminated, self.truncated, self.won = (
            torch.zeros(num_envs, dtype=torch.bool, device=device) for _ in range(3)
        )
        self.extras: dict[str, Any] = {}
        self.closed = 0

    def reset(self, *, seed: int | None = None, env_ids: Tensor | None = None, options: Any = None) -> tuple[Any, Any]:
        if env_ids is not None and not self.is_mjlab:
            raise TypeError("Isaac Lab's direct environments restart no single rows")
        if seed is not None:
            torch.manual_seed(seed)
            self.starts.zero_().sub_(1)
        self._reset_idx(torch.arange(self.num_envs, device=self.device) if env_ids is None else env_ids)
        return self._get_observations(), self.extras

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self.played.copy_(action[:, 0])
        self.x += self.played
        self.age += 1
        self.reward.copy_(self.x)
        torch.gt(self.x, 5, out=self.terminated)
        torch.ge(self.age, 4, out=self.truncated)
        torch.gt(self.x, 5.5, out=self.won)
        if self.is_mjlab:
            self.extras["log"] = {}
        rows = (self.terminated | self.truncated).nonzero().flatten()
        if len(rows):
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self._get_observations()
            self._reset_idx(rows)
        return self._get_observations(), self.reward, self.terminated, self.truncated, self.extras

    def _reset_idx(self, rows: Tensor) -> None:
        self.starts[rows] += 1
        self.x[rows] = 0.01 * self.starts[rows]
        self.extras["log"] = {"length": self.age[rows].mean(), "level": 2, "age": self.age.clone(), "name": "rail"}
        self.age[rows] = 0

    def _get_observations(self) -> dict[str, Any]:
        noisy = self.x + self.noise * torch.rand(self.num_envs, device=self.device)
        return {"actor": torch.stack([noisy, self.age], 1), "critic": {"x": self.x, "age": self.age}}

    def close(self) -> None:
        self.closed += 1
