"""Windows of control steps sampled from a replay buffer, and the spec of the windows to sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from robopolicy.data.goals import GoalConfig


@dataclass(frozen=True)
class ReplaySampleSpec:
    """Specification of the samples that an algorithm needs.

    Only environment steps have an age; the two functions of the age do not affect steps of a dataset:

    * `age_quantile(uniform)` maps numbers `(B,)` float64 in [0, 1) to positions `(B,)` in [0, 1) of a lane, from its
      oldest to its newest slot: the inverse cumulative distribution of the positions;
    * `weighting(newer, filled)` gives weights `(B,)`, on average 1 over a lane, from the numbers `(B,)` of slots that
      were written later and of slots in use.
    """

    batch_size: int  # B, rows per gradient step
    horizon: int  # H, actions per chunk
    steps: int  # n, control steps until the bootstrap; the executed part of the chunk, or more for n-step returns
    gamma: float  # discount per control step
    obs_horizon: int = 1  # To
    chunk_starts_only: bool = False  # windows start only at the first step of a chunk, so that its record is known
    returns: bool = False  # whether the algorithm reads `Transitions.returns`
    age_quantile: Callable[[Tensor], Tensor] | None = None  # distribution of environment steps; None: uniform
    weighting: Callable[[Tensor, Tensor], Tensor] | None = None  # weights of environment steps; None: all 1
    goals: GoalConfig | None = None  # goals in hindsight for steps of a dataset; None: its own goals and rewards


@dataclass(frozen=True)
class Transitions:
    """Batch of B windows for temporal-difference losses and imitation losses on replayed chunks."""

    obs: dict[str, Tensor]  # {key: (B, To, ...)}
    chunk: Tensor  # (B, H, A) executed actions in env units; the last one is repeated after the end of the episode
    mask: Tensor  # (B, H) float32, 0 on steps after the end
    rewards: Tensor  # (B, n) per control step, 0 after the end
    steps: Tensor  # (B,) int64, control steps until the bootstrap; fewer than n where the episode ended
    discount: Tensor  # (B,) gamma ** steps, 0 where the episode terminated
    reward: Tensor  # (B,) sum of gamma ** j * rewards_j
    next_obs: dict[str, Tensor]  # {key: (B, To, ...)} after `steps` control steps
    returns: Tensor  # (B,) discounted return to go of the stored episode; NaN while it is unfinished or was truncated
    record: dict[str, Tensor]  # {name: (B, ...)} data recorded by the actor at the decision, e.g. its latent noise
    online: Tensor  # (B,) bool, collected in this run and not read from a dataset
    weight: Tensor  # (B,) importance weight of prioritised sampling, or weight in a mixture; else 1
    index: Tensor  # (B,) int64, index in the buffer, for `update_priorities`

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def next_obs_valid(self) -> Tensor:
        """Whether `next_obs` `(B,)` was observed; the last step of a terminated dataset episode has a substitute."""
        return self.online | (self.discount > 0)

    def split(self, size: int) -> Iterator[Transitions]:
        """Yield consecutive minibatches of `size` rows."""
        if len(self) <= size:
            yield self
            return
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield _combine([self], lambda column: column[0][rows])  # noqa: B023 - called immediately

    def select(self, rows: Tensor) -> Transitions:
        """Select rows by their indices or by a mask `(B,)`."""
        return _combine([self], lambda column: column[0][rows])

    @staticmethod
    def concat(parts: list[Transitions]) -> Transitions:
        """Join batches; records that one of them lacks are dropped."""
        return _combine(parts, torch.cat)

    @staticmethod
    def interleave(parts: list[Transitions], batches: int) -> Transitions:
        """Join so that each of `batches` minibatches gets an equal fraction of every part."""
        return _combine(
            parts, lambda column: torch.cat([x.unflatten(0, (batches, -1)) for x in column], 1).flatten(0, 1)
        )


def _combine(parts: list[Transitions], function: Callable[[list[Tensor]], Tensor]) -> Transitions:
    """Apply `function` to every column of `parts`; of mappings, to the keys that all of them have."""
    values = {}
    for entry in fields(Transitions):
        column = [getattr(part, entry.name) for part in parts]
        if isinstance(column[0], dict):
            shared = [key for key in column[0] if all(key in item for item in column)]
            values[entry.name] = {key: function([item[key] for item in column]) for key in shared}
        else:
            values[entry.name] = function(column)
    return Transitions(**values)


@dataclass(frozen=True)
class Rollout:
    """Experience of one iteration; time first, one row per chunk decision (per control step when H = 1)."""

    obs: dict[str, Tensor]  # (T, N, To, ...) input of the policy
    record: dict[str, Tensor]  # (T, N, ...) what `Policy.decisions` needs
    logp: Tensor  # (T, N, K) log-probability of each decision when sampled
    reward: Tensor  # (T, N) discounted reward summed over the executed steps of the chunk
    steps: Tensor  # (T, N) int64, executed control steps (fewer than Ta when the episode ended)
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool
    final_obs: dict[str, Tensor]  # (M, To, ...) last observations of the M truncated entries, row-major; they bootstrap
    last_obs: dict[str, Tensor]  # (N, To, ...) observation after the last decision
    terms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # (T, N) reward terms, where known
    undiscounted: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # (T, N) without discount
    weight: Tensor | None = None  # (T, N) importance weights if earlier weights of the policy acted

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N)."""
        return int(self.reward.shape[0]), int(self.reward.shape[1])


@dataclass(frozen=True, kw_only=True)
class GroupRollout(Rollout):
    """Complete episodes, several from each initial state; environment n runs one of them and then idles."""

    group: Tensor  # (N,) int64, equal for episodes from one start
    valid: Tensor  # (T, N) bool, False after the end of the episode, where all other entries are undefined

    @property
    def returns(self) -> Tensor:
        """Sum of the rewards of each episode `(N,)`."""
        return torch.where(self.valid, self.reward, 0.0).sum(0)
