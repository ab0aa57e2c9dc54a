"""Where the advantage starts for methods that value steps: gains of a critic, and windows of unfinished rows."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, by_trajectory, pair
from robopolicy.core.returns import sequence_gae
from robopolicy.core.segments import Segments


def step_gain(decisions: Decisions, *, penalty: float = 0.05, gamma: float = 0.9) -> Tensor:
    """`V(next) - V - penalty + r + return-to-go` of each unit, at its decisions `(N, T)` (DigiRL, S157).

    The value of a unit is the mean of `value` over its decisions, 0 after the last; the return is discounted per unit.
    """
    unit = torch.zeros_like(decisions.logp_old, dtype=torch.int64) if decisions.unit is None else decisions.unit
    owner = by_trajectory(decisions)
    segments = Segments(pair(owner, unit), decisions.valid())  # in order of trajectories, then of units
    value, reward = segments.mean(decisions.need("value")), segments.sum(decisions.need("reward"))
    trajectory = torch.zeros_like(segments.count, dtype=torch.int64)
    trajectory[segments.index] = owner.expand(decisions.shape)
    following, togo = torch.zeros_like(value), reward.clone()
    later = -1  # the next unit that has decisions
    for index in reversed(range(segments.size)):
        if later >= 0 and int(trajectory[later]) == int(trajectory[index]):
            following[index] = value[later]
            togo[index] += gamma * togo[later]
        later = index if float(segments.count[index]) > 0 else later
    gain = segments.spread(following - value - penalty + reward + togo)
    return gain.masked_fill(~decisions.valid(), 0.0)


def window_gae(decisions: Decisions, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """GAE `(N, T)` in which rows that were cut off go on as they stood: V(next) = V(last) at the cut (T-PPO, S000).

    Needs `value`, and `extra["finished"]` (N,) bool; finished rows have the ordinary GAE.
    """
    value, valid = decisions.need("value"), decisions.valid()
    finished = decisions.need_extra("finished")
    last = value.gather(1, _last(valid)).squeeze(1)
    advantage, _ = sequence_gae(
        decisions.need("reward"), value, gamma, lam, valid, last.masked_fill(finished.bool(), 0.0)
    )
    return advantage


def _last(valid: Tensor) -> Tensor:
    """Column `(N, 1)` of the last decision of each row, 0 where there is none."""
    columns = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
    return columns.masked_fill(~valid, 0).amax(1, keepdim=True)
