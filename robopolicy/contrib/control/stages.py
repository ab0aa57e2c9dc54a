"""Advantages of sets of rollouts (Hamid et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import PositiveInt
from robopolicy.core.decisions import Decisions, first_rows, per_row


def set_values(returns: Tensor, ways: Tensor, subsets: Tensor) -> Tensor:
    """Mean return times the fraction of distinct trajectories, for each of `subsets` `(S, n)` of V rollouts: `(G, S)`.

    Args:
        returns: (G, V).
        ways: (G, V) equal numbers for equal trajectories; a set of identical trajectories scores 0.
        subsets: (S, n) members.
    """
    order = torch.sort(ways[:, subsets], -1)[0]
    different = 1 + (torch.diff(order) != 0).sum(-1)
    share = torch.where(different > 1, different / subsets.shape[1], 0.0)
    return returns[:, subsets].mean(-1) * share


def set_advantage(returns: Tensor, ways: Tensor, members: int) -> Tensor:
    """Mean value of the sets with a rollout minus the mean of the sets without it, `(G, V)`."""
    count = returns.shape[1]
    subsets = torch.tensor(list(combinations(range(count), members)), device=returns.device)
    values = set_values(returns, ways, subsets).to(returns.dtype)
    inside = torch.zeros(len(subsets), count, dtype=returns.dtype, device=returns.device).scatter_(1, subsets, 1.0)
    return values @ inside / inside.sum(0) - values @ (1 - inside) / (1 - inside).sum(0)


@dataclass(frozen=True)
class SetAdvantage:
    """Score sets of rollouts by mean reward times diversity; each rollout gets the excess of its sets over the others.

    All sets of `size` out of the group are scored; rollouts with equal `extra["signature"]` (N,) int are identical.
    Source: Hamid et al. 2025.
    """

    centres: ClassVar[bool] = True
    size: PositiveInt = 4  # at most the group size minus 1

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Mean score of the sets with a rollout minus the mean of the sets without it, (N, 1)."""
        first = first_rows(decisions)
        group, reward = decisions.require("group")[first], advantage[first, 0]
        signature = decisions.require_extra("signature")[first]
        result = torch.zeros_like(reward)
        order = torch.argsort(group, stable=True)
        ends = torch.nonzero(torch.diff(group[order])).squeeze(1) + 1
        for members in torch.tensor_split(order, ends.cpu()):
            size = min(self.size, len(members) - 1)
            if size > 1:  # a single rollout has no diversity
                result[members] = set_advantage(reward[members][None], signature[members][None], size)[0]
        return per_row(result, decisions)
