"""The objective of rows that others decided: no ratio to a behaviour that is unknown, and none that is clipped."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions

Info = dict[str, Tensor]


@dataclass(frozen=True)
class Taught:
    """`-A p / (p + shape)` with the current probability p of each decision of a teacher's rows (AMPO, S119).

    Unlikely decisions learn most, likely ones hardly any more. The mean is over all decisions of the batch, so that
    beside an estimator with the weight `from_source` and the aggregation "tok" it is one mean over both kinds of rows.
    """

    source: int = 2  # of the teacher's rows
    shape: float = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Loss, and the mean probability of what was taught; 0 where nothing was."""
        valid = decisions.valid()
        taught = valid & (decisions.need("source") == self.source).unsqueeze(1)
        chance = logp.clamp(max=0.0).exp()  # a density may exceed 1
        losses = (-advantage * chance / (chance + self.shape)).masked_fill(~taught, 0.0)
        return masked_mean(losses, valid), {"taught_probability": masked_mean(chance.detach(), taught)}
