"""Group-relative stages with statistics other than mean and standard deviation; each trajectory counts once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt
from robopolicy.core.advantage import Scope, Stage
from robopolicy.core.advantage_sources import UnitView, trajectory_gae
from robopolicy.core.decisions import Decisions, by_group, by_group_depth, by_trajectory, counted_rows, pair
from robopolicy.core.segments import Segments

ROLLOUTS = Scope(by_group, reduce_over=by_trajectory)


@dataclass(frozen=True)
class InformativeScale:
    """Divide by the fraction of trajectories with nonzero advantage, to correct for groups without signal (GPG)."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        first = advantage[counted_rows(decisions)]
        return advantage * (len(first) / (first != 0).any(1).sum().clamp(min=1)).to(advantage.dtype)


@dataclass(frozen=True)
class TopMargin:
    """Margin of the best rollout of a group over the second best, as its advantage: the gradient of pass@k."""

    centres: ClassVar[bool] = True
    standardise: bool = True  # divide by the unbiased standard deviation of the group
    eps: NonNegative = 1e-6

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Margin of the best; 0 for the others and in ties."""
        segments = ROLLOUTS.segments(advantage, decisions)
        best = segments.broadcast(segments.largest(advantage))
        is_best = (advantage == best) & segments.enters
        second = segments.broadcast(segments.largest(advantage.masked_fill(is_best, -torch.inf)))
        unique = segments.broadcast(segments.sum(is_best.to(advantage.dtype))) < 1.5
        gap = torch.where(is_best & unique & second.isfinite(), best - second, 0.0)
        return gap / (segments.broadcast(segments.std(advantage)) + self.eps) if self.standardise else gap


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Subtract the minimum-variance baseline of each position: mean return weighted by squared score norms.

    The squared norm of a softmax score is 1 - 2 p + `extra["collision"]` (N, T), the probability that two draws agree;
    it is accumulated up to the position. Use it on `return_to_go` with one row per rollout.
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
    """Compare steps of a group that share the last observations, at several history lengths (HGPO, He et al. 2026).

    Observation ids are `extra["observation"]` (N, T) int, read at the first decision of each unit. The discounted
    return of a step is centred within its cluster at each history length from 1 to `longest + 1`. With `base` the
    input advantage counts as length 0; otherwise it is dropped. The result is the mean of the nonzero advantages over
    the lengths, weighted by `(length + 1) ** power`.
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
        history_id = units.gather(decisions.require_extra("observation").expand(decisions.shape).long())
        group = units.gather(by_group(decisions).expand(decisions.shape).long())
        cluster, exists = group, units.valid
        total = units.gather(advantage.expand(decisions.shape)) if self.base else torch.zeros_like(returns)
        weights = (total != 0).to(returns.dtype)
        for length in range(1, self.longest + 2):
            cluster = dense_ids(pair(cluster, history_id))
            segments = Segments(cluster, exists)
            comparable = exists & (segments.broadcast(segments.count) > 1.5)
            centred = returns - segments.broadcast(segments.mean(returns))
            if self.standardise:
                centred = centred / (segments.broadcast(segments.std(returns, unbiased=False)) + self.eps)
            weight = (length + 1.0) ** self.power * (comparable & (centred != 0)).to(returns.dtype)
            total, weights = total + weight * centred, weights + weight
            history_id = torch.cat(
                [torch.zeros_like(history_id[:, :1]), history_id[:, :-1]], 1
            )  # the observation before
            exists = torch.cat([torch.zeros_like(exists[:, :1]), exists[:, :-1]], 1) & units.valid
        return units.broadcast(total / torch.where(weights > 0, weights, 1.0))


STRUCTURE: dict[str, Callable[..., Stage]] = {"history_groups": HistoryGroups}


def dense_ids(ids: Tensor) -> Tensor:
    """Map ids to smaller ones in the same order, so that nested `pair` calls do not overflow."""
    return torch.searchsorted(torch.sort(ids.flatten())[0], ids.contiguous())
