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
