"""Objectives on the good and the bad trajectories of a group as two sets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.decisions import Decisions, by_group, by_trajectory, first_rows
from robopolicy.core.preferences import scores
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments
from robopolicy.limits import NotNegative, Positive

Info = dict[str, Tensor]


@dataclass(frozen=True)
class Discriminative:
    """DisCO (S103): raise the scores of successes above those of failures, in groups that have both.

    The score is the mean log-probability of a trajectory, or its mean ratio to the old policy. With a `temperature` tau
    the failures count by `tau log mean exp(score / tau)`, so that the likeliest ones matter most; without one by their
    mean, which is a policy gradient with the advantage `(R - p) / (p (1 - p))`. Hold it with the penalty `kl_barrier`.
    """

    score: str = "logp"  # logp | ratio
    temperature: Positive | None = None

    def __post_init__(self) -> None:
        if self.score not in ("logp", "ratio"):
            raise ValueError(f"Discriminative score must be 'logp' or 'ratio', got {self.score!r}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the groups that have successes (advantage above 0) and failures."""
        change = log_ratio(logp, decisions.logp_old, decisions)
        value = change.exp() if self.score == "ratio" else logp
        first = first_rows(decisions)
        rows = Segments(by_trajectory(decisions), decisions.valid())
        mean = rows.spread(rows.mean(value))[first, :1]  # (S, 1)
        good = advantage[first, :1] > 0
        ids = by_group(decisions)[first]
        winners, losers = Segments(ids, good), Segments(ids, ~good)
        if self.temperature is None:
            beaten = losers.mean(mean)
        else:
            top = losers.largest(mean).detach().clamp(min=-1e30)  # keeps the exponentials in range
            share = losers.mean(((mean - losers.spread(top)) / self.temperature).clamp(max=0.0).exp())
            beaten = top + self.temperature * share.clamp(min=1e-30).log()
        both = (winners.count > 0) & (losers.count > 0)
        margin = (winners.mean(mean) - beaten).masked_fill(~both, 0.0)
        groups = both.sum()
        loss = -margin.sum() / groups.clamp(min=1)
        return loss, {"margin": -loss.detach(), "mixed_groups": groups.to(logp.dtype) / max(both.numel(), 1)}


@dataclass(frozen=True)
class SetPreference:
    """GEPO (S117): the winners of a group, all equally good, against the rest.

    `-log sigmoid(beta (mean r+ - mean r-)) + variance Var(r+)` with `r = log pi / pi_ref` of a trajectory; the second
    term keeps the winners alike. One winner and one loser: DPO.
    """

    beta: NotNegative = 0.1
    variance: Positive = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the groups whose trajectories are not all equal; winners have the highest advantage."""
        first = first_rows(decisions)
        score, value = scores(logp, decisions)[first].unsqueeze(1), advantage[first, :1]
        ids = by_group(decisions)[first]
        everyone = Segments(ids, torch.ones_like(value, dtype=torch.bool))
        best = value >= everyone.spread(everyone.largest(value))
        winners, losers = Segments(ids, best), Segments(ids, ~best)
        loss = -functional.logsigmoid(self.beta * (winners.mean(score) - losers.mean(score)))
        loss = loss + self.variance * winners.mean((score - winners.spread(winners.mean(score))) ** 2)
        both = losers.count > 0
        return loss.masked_fill(~both, 0.0).sum() / both.sum().clamp(min=1), {"mixed_groups": both.to(score).mean()}


@dataclass(frozen=True)
class KahnemanTversky:
    """KTO: every trajectory is desirable or not by itself; gains and losses are felt against a reference point.

    `w (1 - sigmoid(+-beta (r - z)))` with `r = log pi / pi_ref`, + for a positive advantage. The reference point z is
    the mean of r over the batch, never negative and without gradient, an estimate of KL(pi || pi_ref).
    """

    beta: NotNegative = 0.1
    desirable: float = 1.0  # weight w of the good ones
    undesirable: float = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the trajectories."""
        first = first_rows(decisions)
        score, good = scores(logp, decisions)[first], advantage[first, 0] > 0
        point = score.detach().mean().clamp(min=0.0)
        margin = self.beta * (score - point)
        felt = torch.where(good, self.desirable * torch.sigmoid(-margin), self.undesirable * torch.sigmoid(margin))
        return felt.mean(), {"kl_ref": point}
