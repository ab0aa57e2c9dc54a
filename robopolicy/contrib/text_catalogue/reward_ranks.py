"""Rewards that compare the trajectories of a group: ranks, ranks of failures, Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction
from robopolicy.core.dominance import dominance_matrix
from robopolicy.text.rollouts.protocols import Outcomes, Reward


@dataclass(frozen=True)
class Rank(Reward):
    """Rank of a metric within its group, from 0 to 1; equal values share the mean of their ranks.

    Source: URPO, Lu et al. 2025.

    With `where`, only trajectories with a positive value of that metric are ranked, e.g. tasks without a verifier;
    the others keep their reward.
    """

    metric: str = "reward"
    where: str | None = None

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        metric = outcomes.require(self.metric)
        if self.where is None:
            return in_groups(outcomes.key, metric, ranks)
        ranked, reward = outcomes.require(self.where) > 0, outcomes.reward.to(torch.float64, copy=True)
        reward[ranked] = in_groups(outcomes.key[ranked], metric[ranked], ranks)
        return reward


@dataclass(frozen=True)
class RankFailures(Reward):
    """Reward of failures: `share` times the rank of a metric among the failures of the group.

    Source: R3, Jiang et al. 2026.

    Successes keep their reward. A share of 0 changes nothing.
    """

    metric: str = "progress"
    share: Fraction = 0.1

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        failed = outcomes.reward <= 0.5
        reward = outcomes.reward.clone()
        metric = outcomes.require(self.metric)[failed]
        reward[failed] += self.share * in_groups(outcomes.key[failed], metric, ranks)
        return reward


@dataclass(frozen=True)
class ParetoRank(Reward):
    """Fraction of its group that does not dominate a trajectory (FATE, Yin et al. 2026); one objective gives the rank.

    A trajectory dominates another if no objective is worse and one is better; ties count half.
    """

    objectives: Sequence[str]  # metrics, higher is better

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        return in_groups(
            outcomes.key, torch.stack([outcomes.require(name) for name in self.objectives], 1), pareto_ranks
        )


def in_groups(key: Tensor, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function `(G, ...) -> (G,)` to the values `(M, ...)` of each group."""
    result = torch.zeros(len(key), dtype=torch.float64)
    for group in key.unique():
        rows = key == group
        result[rows] = function(values[rows])
    return result


def ranks(values: Tensor) -> Tensor:
    """Compute ranks `(G,)` from 0 to 1 of values `(G,)`; a single value gets 0.5."""
    return pareto_ranks(values.unsqueeze(1))


def pareto_ranks(values: Tensor) -> Tensor:
    """Compute the fraction `(G,)` of the others that do not dominate each row of `(G, O)`; ties count half."""
    if len(values) == 1:
        return torch.full((1,), 0.5, dtype=torch.float64)
    equal = (values[:, None] == values).all(2)
    dominated = dominance_matrix(values).double().sum(0) + 0.5 * (equal.double().sum(1) - 1.0)
    return 1.0 - dominated / (len(values) - 1)
