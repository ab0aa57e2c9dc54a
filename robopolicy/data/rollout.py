"""On-policy experience: T chunk decisions of N environments, as handed to an algorithm's `update`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Experience of one iteration; time first, one row per chunk decision (per control step when H = 1)."""

    obs: dict[str, Tensor]  # (T, N, To, ...) what the policy saw
    record: dict[str, Tensor]  # (T, N, ...) what `Policy.decisions` needs
    logp: Tensor  # (T, N, K) log-probability of each decision when sampled
    reward: Tensor  # (T, N) discounted reward summed over the executed steps of the chunk
    steps: Tensor  # (T, N) int64, control steps really executed (fewer than Ta when the episode ended)
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool
    final_obs: dict[
        str, Tensor
    ]  # (M, To, ...) last observations of the M entries that bootstrap: truncated, not terminated; row-major
    last_obs: dict[str, Tensor]  # (N, To, ...) observation after the last decision
    terms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # (T, N) parts of the reward, where known
    earned: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # (T, N) the same without discount in a chunk

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N)."""
        return int(self.reward.shape[0]), int(self.reward.shape[1])


@dataclass(frozen=True, kw_only=True)
class GroupRollout(Rollout):
    """Whole episodes, several from each start state; environment n plays one of them and then waits."""

    group: Tensor  # (N,) int64, equal for episodes from one start
    played: Tensor  # (T, N) bool, False after the episode has ended; the rest of such entries means nothing

    @property
    def returns(self) -> Tensor:
        """Sum of the rewards of each episode `(N,)`."""
        return torch.where(self.played, self.reward, 0.0).sum(0)
