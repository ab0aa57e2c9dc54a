"""Logged episodes as one policy would decide in them: histories, windows of a chunk's length, returns."""

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
_BATCH = 1024  # frames a policy or a critic sees at a time


class Logs:
    """N episodes of F frames; W windows start at the frames from which a whole chunk was played or the episode ended.

    Returns are discounted per control step and end with the episode. A window whose end was cut off by a time limit has
    no successor and is left out, so that what is fitted on windows looks beyond the limit.
    """

    def __init__(self, episodes: Episodes, spec: PolicySpec, gamma: float) -> None:
        """Index the episodes.

        Raises:
            UserError: They lack rewards or what the policy sees, or the discount makes no sense.
        """
        if not 0 < gamma <= 1:
            raise UserError(f"The discount per control step must lie in (0, 1], got {gamma}.")
        episodes = episodes.without_closing_frames().with_executed_actions()
        if "reward" not in episodes.arrays:
            raise UserError("The logs have no 'reward'; collect them anew.")
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
            raise UserError(f"No logged episode is longer than the {n} steps that the policy plays at a time.")
        ahead = self.window[:, None] + np.arange(n)
        inside = ahead <= last[self.window, None]
        played = np.where(inside, reward[np.minimum(ahead, len(reward) - 1)], 0)  # (W, n)
        self.reward: Array = (played * gamma ** np.arange(n)).sum(1)  # (W,)
        self.discount = np.where(known[self.window], gamma**n, 0.0)  # (W,) 0 where the episode terminated
        self.following = np.minimum(self.window + n, last[self.window])  # (W,) frames where the next decision falls
        self._played = np.minimum(ahead, last[self.window, None])  # (W, n)

    @property
    def cut_weight(self) -> float:
        """Largest discount at which a time limit cut an episode off: what lies beyond it weighs so much."""
        whole = np.zeros(len(self.episodes), np.bool_)
        whole[self.window] = True
        cut = ~whole[self.episodes.ends - 1]
        return float(self.gamma ** self.episodes.lengths[cut].min()) if cut.any() else 0.0

    def observations(self, frames: NDArray[np.int64]) -> Observation:
        """Histories `{key: (B, To, ...)}` that the policy sees at `frames` `(B,)`."""
        index = self._history[frames]
        return {key: _tensor(self.episodes.arrays[key][index]) for key in self.spec.observation}

    def chunks(self, windows: NDArray[np.int64]) -> Tensor:
        """Actions `(B, n, A)` played in `windows` `(B,)`; the last one repeated after the end of an episode."""
        return _tensor(self.episodes.arrays["action"][self._played[windows]])

    def batches(self, frames: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """`frames` in portions that fit into memory."""
        for start in range(0, len(frames), _BATCH):
            yield frames[start : start + _BATCH]

    @torch.no_grad()
    def decide(self, policy: Policy, *, samples: int, deterministic: bool, seed: int) -> Tensor:
        """What the policy plays at every frame: executed chunks `(K, F, n, A)`, K = 1 where it has no choice."""
        count = 1 if deterministic and not policy.is_steerable else samples
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for frames in self.batches(np.arange(len(self.episodes))):
            obs = {key: value.to(policy.device) for key, value in self.observations(frames).items()}
            acts = [policy.act(obs, deterministic=deterministic, generator=generator) for _ in range(count)]
            rows.append(torch.stack([chunk[:, : self.spec.action_horizon].cpu().float() for chunk in acts]))
        return torch.cat(rows, 1)

    def by_episode(self, values: Array) -> Array:
        """Numbers of the windows `(W,)` as `(N, T)` by episode and age; 0 where no window starts."""
        folded = np.zeros_like(self.rewards)
        folded[self.episode[self.window], self.age[self.window]] = values
        return folded


def _check_spec(episodes: Episodes, spec: PolicySpec) -> None:
    if HIDDEN_STATE in spec.observation:
        raise UserError("A recurrent policy depends on all it has seen; evaluate it by playing.")
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
