"""Stages that compare the rollouts of a group by statistics other than mean and standard deviation.

A trajectory counts once here, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt
from robopolicy.core.advantage import Scope, Stage
from robopolicy.core.advantage_sources import UnitView, trajectory_gae
from robopolicy.core.decisions import Decisions, by_group, by_group_depth, by_trajectory, first_rows, pair
from robopolicy.core.segments import Segments

ROLLOUTS = Scope(by_group, reduce_over=by_trajectory)


@dataclass(frozen=True)
class InformativeScale:
    """Divide by the share of trajectories whose advantage is not 0: groups that agree dilute nothing (GPG)."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        first = advantage[first_rows(decisions)]
        return advantage * (len(first) / (first != 0).any(1).sum().clamp(min=1)).to(advantage.dtype)


@dataclass(frozen=True)
class TopMargin:
    """Advantage of the best rollout of a group by its margin over the second best: the gradient of pass@k."""

    centres: ClassVar[bool] = True
    standardise: bool = True  # divide by the unbiased standard deviation of the group
    eps: NonNegative = 1e-6

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Lead of the best, 0 for the others and where two are best."""
        segments = ROLLOUTS.segments(advantage, decisions)
        best = segments.broadcast(segments.largest(advantage))
        leads = (advantage == best) & segments.enters
        second = segments.broadcast(segments.largest(advantage.masked_fill(leads, -torch.inf)))
        alone = segments.broadcast(segments.sum(leads.to(advantage.dtype))) < 1.5
        gap = torch.where(leads & alone & second.isfinite(), best - second, 0.0)
        return gap / (segments.broadcast(segments.std(advantage)) + self.eps) if self.standardise else gap


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Subtract the baseline of least variance at each position: returns weighted by the squared norms of the scores.

    The squared norm of a softmax score is 1 - 2 p + `extra["collision"]` (N, T), the probability that two draws agree;
    it is summed up to the position. For `return_to_go` of rollouts that are one row each.
    """

    centres: ClassVar[bool] = True

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage `(N, T)`."""
        norm = 1.0 - 2.0 * decisions.logp_old.exp() + decisions.require_extra("collision")
        weight = torch.cumsum(norm.masked_fill(~decisions.valid(), 0.0).clamp(min=0.0), 1)
        segments = Segments(by_group_depth(decisions), weight.masked_fill(~decisions.valid(), 0.0))
        return (advantage - segments.broadcast(segments.mean(advantage))).masked_fill(~decisions.valid(), 0.0)


GROUP_STATISTICS: dict[str, Callable[..., Stage]] = {
    "informative_scale": InformativeScale,
    "top_margin": TopMargin,
    "optimal_token_baseline": OptimalTokenBaseline,
}


@dataclass(frozen=True)
class HistoryGroups:
    """Compare steps of a group that saw the same last observations, at several lengths of history.

    Ids of observations are `extra["observation"]` (N, T) int, read at the first decision of each unit. The discounted
    return of a step is centred within its cluster at each history length from 1 to `longest + 1`. With `base` the
    advantage so far, that of the episode, counts as length 0; else it is dropped. The result is the mean over the
    lengths at which there is an advantage at all, weighted by `(length + 1) ** power`. Source: He et al. 2026, HGPO.
    """

    centres: ClassVar[bool] = True
    longest: NonNegativeInt = 2  # K; 0 is the step term of GiGPO
    gamma: Fraction = 0.95  # per unit
    power: float = 1.0
    base: bool = True
    standardise: bool = False  # divide by the population standard deviation of the cluster
    eps: NonNegative = 1e-6

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Step advantages `(N, T)`."""
        units = UnitView(decisions)
        reward = decisions.require("reward")
        gamma = (self.gamma, self.gamma)
        returns = units.gather(trajectory_gae(decisions, reward, torch.zeros_like(reward), gamma, (1.0, 1.0), "unit"))
        seen = units.gather(decisions.require_extra("observation").expand(decisions.shape).long())
        group = units.gather(by_group(decisions).expand(decisions.shape).long())
        cluster, exists = group, units.valid
        total = units.gather(advantage.expand(decisions.shape)) if self.base else torch.zeros_like(returns)
        weights = (total != 0).to(returns.dtype)
        for length in range(1, self.longest + 2):
            cluster = dense_ids(pair(cluster, seen))
            segments = Segments(cluster, exists)
            company = exists & (segments.broadcast(segments.count) > 1.5)
            centred = returns - segments.broadcast(segments.mean(returns))
            if self.standardise:
                centred = centred / (segments.broadcast(segments.std(returns, unbiased=False)) + self.eps)
            weight = (length + 1.0) ** self.power * (company & (centred != 0)).to(returns.dtype)
            total, weights = total + weight * centred, weights + weight
            seen = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1)  # the observation before
            exists = torch.cat([torch.zeros_like(exists[:, :1]), exists[:, :-1]], 1) & units.valid
        return units.broadcast(total / torch.where(weights > 0, weights, 1.0))


STRUCTURE: dict[str, Callable[..., Stage]] = {
    "history_groups": HistoryGroups,
}


def dense_ids(ids: Tensor) -> Tensor:
    """Small ids in the same order, so that pairs of pairs do not overflow."""
    return torch.searchsorted(torch.sort(ids.flatten())[0], ids.contiguous())
