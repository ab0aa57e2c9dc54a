"""Objectives on pairs of trajectories of one group: which is better, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.preferences import logistic_pair, preference_pairs, scores
from robopolicy.limits import NotNegative

Info = dict[str, Tensor]


@dataclass(frozen=True)
class DirectPreference:
    """DPO: `-log sigmoid(beta (r+ - r-))` over all ordered pairs of a group, r = log pi / pi_ref of the trajectory."""

    beta: NotNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the pairs; 0 where no two outcomes differ."""
        score = scores(logp, decisions)
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        return mean_or_zero(logistic_pair(score[chosen], score[rejected], self.beta)), agreement(
            score, chosen, rejected
        )


def mean_or_zero(loss: Tensor) -> Tensor:
    """Mean, and 0 of nothing."""
    return loss.sum() / max(loss.numel(), 1)


def agreement(score: Tensor, chosen: Tensor, rejected: Tensor) -> Info:
    """Share of the pairs that the scores put in the right order."""
    return {"accuracy": mean_or_zero((score[chosen] > score[rejected]).to(score.dtype)).detach()}
