"""Pendulum, a version with noisy rewards, and a controller that swings it up."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import torch
from torch import Tensor

from robopolicy.policies.wrappers.black_box import register_callable

PLAIN, NOISY = "gymnasium/Pendulum-v1", "gymnasium/NoisyPendulum-v1"
NOISE = 2.0  # standard deviation of the noise on rewards, which are between -16 and 0
CONTROLLER = "energy_shaping"


class NoisyReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds Gaussian noise to every reward, sampled from the environment's own generator."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and add noise to its reward."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        noise = NOISE * self.env.unwrapped.np_random.standard_normal()
        return obs, float(reward) + noise, terminated, truncated, info


def make_noisy(**settings: Any) -> gymnasium.Env[Any, Any]:
    """Pendulum with noisy rewards."""
    return NoisyReward(gymnasium.make("Pendulum-v1", **settings).unwrapped)


def energy_shaping(obs: dict[str, Tensor]) -> Tensor:
    """Torques `(B, 1, 1)` in shares of the largest, which raise the energy to its upright value and hold the rod there.

    The rod has mass 1, length 1 and gravity 10: its energy is `speed ** 2 / 6 + 5 cos`, which is 5 upright at rest.
    """
    cosine, sine, speed = obs["state"][:, -1].unbind(-1)
    lacking = 5.0 - speed.square() / 6 - 5 * cosine
    swing = lacking * torch.where(speed == 0, torch.ones_like(speed), speed.sign())
    hold = -(10 * sine + 2 * speed)
    return (torch.where((cosine > 0.9) & (speed.abs() < 4), hold, swing) / 2).clamp(-1, 1)[:, None, None]


def register() -> None:
    """Register the noisy task and the controller; needed in every process."""
    if "NoisyPendulum-v1" not in gymnasium.registry:
        gymnasium.register("NoisyPendulum-v1", make_noisy, max_episode_steps=200)
        register_callable(CONTROLLER, energy_shaping)
