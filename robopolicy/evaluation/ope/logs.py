"""Logged episodes indexed for a policy: histories, windows of a chunk's length, returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.chunks import history_index
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy
from robopolicy.spec import HIDDEN_STATE, PolicySpec

Array = NDArray[np.float64]
_BATCH = 1024  # frames per batch of a policy or a critic


class Logs:
    """N episodes of F frames; W windows start where a whole chunk was executed or the episode terminated.

    Returns are discounted per control step and end with the episode. A window that was truncated by a time limit has no
    successor and is left out, so that values fitted on windows extrapolate beyond the limit.
    """

    def __init__(self, episodes: Episodes, spec: PolicySpec, gamma: float) -> None:
        """Index the episodes; a UserError is raised for missing rewards or observations, or an invalid discount."""
        if not 0 < gamma <= 1:
            raise UserError(f"The discount per control step must be in (0, 1], got {gamma}.")
        episodes = episodes.without_closing_frames().with_executed_actions()
        if "reward" not in episodes.arrays:
            raise UserError("The logs have no 'reward'; collect them again.")
        _check_spec(episodes, spec)
        self.episodes, self.spec, self.gamma = episodes, spec, gamma
        reward = episodes.arrays["reward"].astype(np.float64).reshape(len(episodes))
        self.episode = np.repeat(np.arange(episodes.num_episodes), episodes.lengths)  # (F,)
        self.age = np.arange(len(episodes)) - episodes.starts[self.episode]  # (F,) control steps into the episode
        self.rewards = np.zeros((episodes.num_episodes, int(episodes.lengths.max())))  # (N, T), 0 after the end
        self.rewards[self.episode, self.age] = reward
        self.returns: Array = self.rewards @ gamma ** np.arange(self.rewards.shape[1])  # (N,)
        self._history = history_index(episodes, spec.obs_horizon)
        last = episodes.ends[self.episode] - 1
        terminated = np.zeros(len(episodes), np.bool_)
        if "terminated" in episodes.arrays:
            terminated = episodes.arrays["terminated"].astype(np.bool_)[last]
        frame, n = np.arange(len(episodes)), spec.action_horizon
        known = frame + n <= last
        self.window = np.flatnonzero(known | terminated)  # (W,) first frames
        if not len(self.window):
            raise UserError(f"No logged episode is longer than the action horizon of {n} steps.")
        ahead = self.window[:, None] + np.arange(n)
        inside = ahead <= last[self.window, None]
        rewards = np.where(inside, reward[np.minimum(ahead, len(reward) - 1)], 0)  # (W, n)
        self.reward: Array = (rewards * gamma ** np.arange(n)).sum(1)  # (W,)
        self.discount = np.where(known[self.window], gamma**n, 0.0)  # (W,) 0 where the episode terminated
        self.following = np.minimum(self.window + n, last[self.window])  # (W,) frames of the next decisions
        self._frames = np.minimum(ahead, last[self.window, None])  # (W, n)

    @property
    def cut_weight(self) -> float:
        """Largest discount at a time limit, which is the weight of the values beyond it."""
        whole = np.zeros(len(self.episodes), np.bool_)
        whole[self.window] = True
        cut = ~whole[self.episodes.ends - 1]
        return float(self.gamma ** self.episodes.lengths[cut].min()) if cut.any() else 0.0

    def observations(self, frames: NDArray[np.int64]) -> Observation:
        """Return the histories `{key: (B, To, ...)}` at `frames` `(B,)`."""
        index = self._history[frames]
        return {key: _tensor(self.episodes.arrays[key][index]) for key in self.spec.observation}

    def chunks(self, windows: NDArray[np.int64]) -> Tensor:
        """Return the actions `(B, n, A)` executed in `windows` `(B,)`, padded with the last one of the episode."""
        return _tensor(self.episodes.arrays["action"][self._frames[windows]])

    def batches(self, frames: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Split `frames` into batches."""
        for start in range(0, len(frames), _BATCH):
            yield frames[start : start + _BATCH]

    @torch.no_grad()
    def decide(self, policy: Policy, *, samples: int, deterministic: bool, seed: int) -> Tensor:
        """Return the executed part of chunks of the policy at every frame, `(K, F, n, A)`; K = 1 without randomness."""
        count = 1 if deterministic and not policy.is_steerable else samples
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for frames in self.batches(np.arange(len(self.episodes))):
            obs = {key: value.to(policy.device) for key, value in self.observations(frames).items()}
            acts = [policy.act(obs, deterministic=deterministic, generator=generator) for _ in range(count)]
            rows.append(torch.stack([chunk[:, : self.spec.action_horizon].cpu().float() for chunk in acts]))
        return torch.cat(rows, 1)

    def by_episode(self, values: Array) -> Array:
        """Arrange values of the windows `(W,)` by episode and age `(N, T)`; 0 where no window starts."""
        table = np.zeros_like(self.rewards)
        table[self.episode[self.window], self.age[self.window]] = values
        return table


def _check_spec(episodes: Episodes, spec: PolicySpec) -> None:
    if HIDDEN_STATE in spec.observation:
        raise UserError("A recurrent policy cannot be evaluated on logs; evaluate it in the simulator.")
    for key, shape in spec.observation.items():
        found = episodes.arrays[key].shape[1:] if key in episodes.arrays else None
        if found != tuple(shape):
            raise UserError(f"The policy needs '{key}' of shape {tuple(shape)}, the logs have {found or 'none'}.")
    if episodes.arrays["action"].shape[1] != spec.action_dim:
        raise UserError(
            f"The policy has {spec.action_dim} action dimensions, the logs have {episodes.arrays['action'].shape[1]}."
        )


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.float32) if np.issubdtype(array.dtype, np.floating) else array)
