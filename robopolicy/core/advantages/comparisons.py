"""Stages that compare the rollouts of a group in other ways than by mean and standard deviation.

A trajectory counts once here, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import Scope, Stage
from robopolicy.core.decisions import Decisions, by_group, by_group_depth, by_trajectory, first_rows
from robopolicy.core.segments import Segments
from robopolicy.limits import NotNegative

ROLLOUTS = Scope(by_group, per=by_trajectory)


@dataclass(frozen=True)
class InformativeScale:
    """Divide by the share of trajectories whose advantage is not 0: groups that agree dilute nothing (GPG)."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        first = advantage[first_rows(decisions)]
        return advantage * (len(first) / (first != 0).any(1).sum().clamp(min=1)).to(advantage.dtype)


@dataclass(frozen=True)
class TopGap:
    """Only the best rollout of a group learns, from its lead over the second best: the gradient of pass@k (1.00)."""

    centres: ClassVar[bool] = True
    standardise: bool = True  # divide by the unbiased standard deviation of the group
    eps: NotNegative = 1e-6

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Lead of the best, 0 for the others and where two are best."""
        segments = ROLLOUTS.segments(advantage, decisions)
        best = segments.spread(segments.largest(advantage))
        leads = (advantage == best) & segments.enters
        second = segments.spread(segments.largest(advantage.masked_fill(leads, -torch.inf)))
        alone = segments.spread(segments.sum(leads.to(advantage.dtype))) < 1.5
        gap = torch.where(leads & alone & second.isfinite(), best - second, 0.0)
        return gap / (segments.spread(segments.std(advantage)) + self.eps) if self.standardise else gap


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Subtract the baseline of least variance at each position: returns weighted by the squared norms of the scores.

    The squared norm of a softmax score is 1 - 2 p + `extra["collision"]` (N, T), the probability that two draws agree;
    it is summed up to the position. For `return_to_go` of rollouts that are one row each.
    """

    centres: ClassVar[bool] = True

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage `(N, T)`."""
        norm = 1.0 - 2.0 * decisions.logp_old.exp() + decisions.need_extra("collision")
        weight = torch.cumsum(norm.masked_fill(~decisions.valid(), 0.0).clamp(min=0.0), 1)
        segments = Segments(by_group_depth(decisions), weight.masked_fill(~decisions.valid(), 0.0))
        return (advantage - segments.spread(segments.mean(advantage))).masked_fill(~decisions.valid(), 0.0)


COMPARISONS: dict[str, Callable[..., Stage]] = {
    "informative_scale": InformativeScale,
    "top_gap": TopGap,
    "optimal_token_baseline": OptimalTokenBaseline,
}
