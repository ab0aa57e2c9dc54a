"""Where the advantage starts for methods that value steps: gains of a critic, and windows of unfinished rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.advantages.timeline import Units, following
from robopolicy.core.decisions import Decisions
from robopolicy.core.returns import sequence_gae
from robopolicy.limits import Share


@dataclass(frozen=True)
class StepGain:
    """`V(next) - V - penalty + r + return-to-go` of each unit, at its decisions (DigiRL, S157).

    The value of a unit stands at its first decision, that after the last is 0; the return is discounted per unit.
    """

    penalty: float = 0.05
    gamma: Share = 0.9

    def __call__(self, decisions: Decisions) -> Tensor:
        """Gains `(N, T)`."""
        units = Units(decisions)
        value, reward = units.at(decisions.need("value")), units.sums(decisions.need("reward"))
        togo, _ = sequence_gae(reward, torch.zeros_like(reward), self.gamma, 1.0, units.valid)
        return units.spread(following(value) - value - self.penalty + reward + togo)

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """1 at the first decision of a unit behind which there is reward, 0 at others: the value is a probability."""
        units = Units(decisions)
        reward = units.sums(decisions.need("reward"))
        togo, _ = sequence_gae(reward, torch.zeros_like(reward), 1.0, 1.0, units.valid)
        return units.spread((togo > 0).to(reward.dtype)), units.beginnings()


@dataclass(frozen=True)
class WindowGae:
    """GAE in which rows that were cut off go on as they stood: V(next) = V(last) at the cut (T-PPO, S000).

    Needs `value`, and `extra["finished"]` (N,) bool; finished rows have the ordinary GAE.
    """

    gamma: Share = 1.0
    lam: Share = 1.0

    def __call__(self, decisions: Decisions) -> Tensor:
        """Advantages `(N, T)`."""
        value, valid = decisions.need("value"), decisions.valid()
        finished = decisions.need_extra("finished")
        last = value.gather(1, _last(valid)).squeeze(1)
        behind = last.masked_fill(finished.bool(), 0.0)
        advantage, _ = sequence_gae(decisions.need("reward"), value, self.gamma, self.lam, valid, behind)
        return advantage

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Lambda returns of finished rows."""
        finished = decisions.need_extra("finished", per_decision=True).bool()
        return self(decisions) + decisions.need("value"), decisions.valid() & finished


def _last(valid: Tensor) -> Tensor:
    """Column `(N, 1)` of the last decision of each row, 0 where there is none."""
    columns = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
    return columns.masked_fill(~valid, 0).amax(1, keepdim=True)
