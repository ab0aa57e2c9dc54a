"""Environment of a point on a line with random starts; demonstrations start at the goal and stay there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec
from robopolicy.sim.vector_env import TorchVectorEnv

HOME = 0.5  # where demonstrations stay
STEPS = 15  # per episode
SPEC = PolicySpec({"state": (1,)}, action_dim=1)


class LineSim(TorchVectorEnv):
    """`state` is the position in [-1, 1]; the action moves it by up to 0.2. All rewards are 0."""

    def __init__(self, num_envs: int) -> None:
        spec = SimSpec(
            task="toy/line",
            observation={"state": TensorSpec((1,))},
            action_low=-torch.ones(1),
            action_high=torch.ones(1),
            control_dt=0.1,
            max_episode_steps=STEPS,
        )
        super().__init__(spec, num_envs)
        self._place = torch.zeros(num_envs, 1)

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        places = [np.random.default_rng(seed).uniform(-1, 1) for seed in seeds]
        self._place = self._place.index_copy(0, rows, torch.tensor(places, dtype=torch.float32)[:, None])

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = self.active_rows(active)
        self._place = torch.where(active[:, None], moved(self._place, action), self._place)
        self.episode_step = self.episode_step + active
        done = active & (self.episode_step == STEPS)
        final, never = self.observe(), torch.zeros_like(done)
        self.restart(done)
        return Step(self.observe(), torch.zeros(self.num_envs), never, done, final, {"success": never})

    def observe(self) -> Observation:
        return {"state": self._place.clone()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        self._place = state["place"].clone()
        return super().load_state_dict(state)


def moved(place: Tensor, action: Tensor) -> Tensor:
    """Position after an action."""
    return (place + 0.2 * action.clamp(-1, 1)).clamp(-1, 1)


def demonstrations(episodes: int = 1, seed: int = 0) -> Episodes:
    """Episodes that stay near `HOME`, with small noise and without rewards."""
    rng = np.random.default_rng(seed)
    shape = (STEPS, 1)
    arrays = [
        {"state": HOME + 0.02 * rng.normal(size=shape), "action": 0.05 * rng.normal(size=shape)}
        for _ in range(episodes)
    ]
    return Episodes.from_list(
        [Episode({key: value.astype(np.float32) for key, value in part.items()}) for part in arrays], 0.1
    )


def gaussian() -> GaussianPolicy:
    """A small squashed Gaussian policy."""
    config = GaussianConfig(
        hidden=(32, 32),
        activation="relu",
        squash=True,
        state_dependent_std=True,
        orthogonal_init=False,
        normalization="minmax",
        action_normalization="minmax",
    )
    policy = GaussianPolicy(config, SPEC)
    policy.fit_normalizer({key: {"min": [-1.0], "max": [1.0]} for key in ("state", "action")})
    return policy


def distance(policy: GaussianPolicy) -> float:
    """Mean distance from `HOME` after an episode of mode actions, over evenly spaced starts."""
    place = torch.linspace(-1, 1, 41)[:, None]
    for _ in range(STEPS):
        place = moved(place, policy.act({"state": place[:, None]}, deterministic=True)[:, 0])
    return float((place - HOME).abs().mean())
