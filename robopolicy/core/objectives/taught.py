"""Objectives of rows that the current policy did not decide, a teacher's or those of an earlier batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.core.aggregate import masked_mean, seq_mean
from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import log_ratio
from robopolicy.limits import Natural, NotNegative

Info = dict[str, Tensor]


@dataclass(frozen=True)
class Taught:
    """`-A p / (p + shape)` with the current probability p of each decision of a teacher's rows (AMPO, S119).

    No ratio to a behaviour that is unknown, and none that is clipped: unlikely decisions learn most, likely ones hardly
    any more. The mean is over all decisions of the batch, so that beside an estimator with the weight `from_source` and
    the aggregation "tok" it is one mean over both kinds of rows.
    """

    source: Natural = 2  # of the teacher's rows
    shape: float = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Loss, and the mean probability of what was taught; 0 where nothing was."""
        valid = decisions.valid()
        taught = valid & (decisions.need("source") == self.source).unsqueeze(1)
        chance = logp.clamp(max=0.0).exp()  # a density may exceed 1
        losses = (-advantage * chance / (chance + self.shape)).masked_fill(~taught, 0.0)
        return masked_mean(losses, valid), {"taught_probability": masked_mean(chance.detach(), taught)}


@dataclass(frozen=True)
class Repeated:
    """`-A min(ratio, 1 + high)` of the rows of an earlier batch, beside the loss of the new ones (PIPO, S014).

    The ratio is bounded above alone, whatever the sign of A. Beside an estimator with the mask `source` a batch that is
    not judged, A = 0 everywhere, changes nothing.
    """

    source: Natural = 1  # of the rows
    high: NotNegative = 0.2

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the trajectories of the mean over their decisions; 0 where there are none."""
        rows = decisions.valid() & (decisions.need("source") == self.source).unsqueeze(1)
        ratio = log_ratio(logp, decisions.logp_old, decisions).exp()
        loss = seq_mean(-advantage * ratio.clamp(max=1.0 + self.high), rows, decisions)
        return loss, {"repeated_ratio": masked_mean(ratio.detach(), rows)}
