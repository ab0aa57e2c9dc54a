"""Stages and starts that know the structure of long episodes: repeated observations, shared steps, subgoals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import Stage
from robopolicy.core.advantages.starts import along_time
from robopolicy.core.advantages.timeline import Units
from robopolicy.core.decisions import Decisions, by_group, pair
from robopolicy.core.segments import Segments
from robopolicy.limits import Natural, NotNegative, Share


@dataclass(frozen=True)
class HistoryGroups:
    """Compare steps of a group that saw the same last observations, at several lengths of history (HGPO, S023).

    Ids of observations are `extra["observation"]` (N, T) int, read at the first decision of each unit. The discounted
    return of a step is centred within its cluster at each history length from 1 to `longest + 1`. With `base` the
    advantage so far, that of the episode, counts as length 0; else it is dropped. The result is the mean over the
    lengths at which there is an advantage at all, weighted by `(length + 1) ** power`.
    """

    centres: ClassVar[bool] = True
    longest: Natural = 2  # K; 0 is the step term of GiGPO
    gamma: Share = 0.95  # per unit
    power: float = 1.0
    base: bool = True
    standardise: bool = False  # divide by the population standard deviation of the cluster
    eps: NotNegative = 1e-6

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Step advantages `(N, T)`."""
        units = Units(decisions)
        reward = decisions.need("reward")
        gamma = (self.gamma, self.gamma)
        returns = units.at(along_time(decisions, reward, torch.zeros_like(reward), gamma, (1.0, 1.0), "unit"))
        seen = units.at(decisions.need_extra("observation").expand(decisions.shape).long())
        group = units.at(by_group(decisions).expand(decisions.shape).long())
        cluster, exists = group, units.valid
        total = units.at(advantage.expand(decisions.shape)) if self.base else torch.zeros_like(returns)
        weights = (total != 0).to(returns.dtype)
        for length in range(1, self.longest + 2):
            cluster = dense_ids(pair(cluster, seen))
            segments = Segments(cluster, exists)
            company = exists & (segments.spread(segments.count) > 1.5)
            centred = returns - segments.spread(segments.mean(returns))
            if self.standardise:
                centred = centred / (segments.spread(segments.std(returns, unbiased=False)) + self.eps)
            weight = (length + 1.0) ** self.power * (company & (centred != 0)).to(returns.dtype)
            total, weights = total + weight * centred, weights + weight
            seen = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1)  # the observation before
            exists = torch.cat([torch.zeros_like(exists[:, :1]), exists[:, :-1]], 1) & units.valid
        return units.spread(total / torch.where(weights > 0, weights, 1.0))


STRUCTURE: dict[str, Callable[..., Stage]] = {
    "history_groups": HistoryGroups,
}


def dense_ids(ids: Tensor) -> Tensor:
    """Small ids in the same order, so that pairs of pairs do not overflow."""
    return torch.searchsorted(torch.sort(ids.flatten())[0], ids.contiguous())
