"""Where the advantage starts for methods that value steps: gains of a critic, and windows of unfinished rows."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.core.advantages.timeline import Units, following
from robopolicy.core.decisions import Decisions
from robopolicy.core.returns import sequence_gae


def step_gain(decisions: Decisions, *, penalty: float = 0.05, gamma: float = 0.9) -> Tensor:
    """`V(next) - V - penalty + r + return-to-go` of each unit, at its decisions `(N, T)` (DigiRL, S157).

    The value of a unit stands at its first decision, that after the last is 0; the return is discounted per unit.
    """
    units = Units(decisions)
    value, reward = units.at(decisions.need("value")), units.sums(decisions.need("reward"))
    togo, _ = sequence_gae(reward, torch.zeros_like(reward), gamma, 1.0, units.valid)
    return units.spread(following(value) - value - penalty + reward + togo)


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
