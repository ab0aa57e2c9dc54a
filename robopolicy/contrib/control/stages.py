"""Advantages of sets of rollouts (S060)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.core.advantages.sets import set_advantage
from robopolicy.core.decisions import Decisions, by_trajectory, first_rows
from robopolicy.limits import Count


@dataclass(frozen=True)
class SetAdvantage:
    """Score sets of rollouts by mean reward times diversity: each gets what its sets exceed others by (S060).

    All sets of `size` out of the group are scored; rollouts with equal `extra["signature"]` (N,) int went the same way.
    """

    centres: ClassVar[bool] = True
    size: Count = 4  # at most one less than the group has

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Mean score of the sets with a rollout minus that of the sets without it, (N, 1)."""
        first = first_rows(decisions)
        group, reward = decisions.need("group")[first], advantage[first, 0]
        signature = decisions.need_extra("signature")[first]
        result = torch.zeros_like(reward)
        order = torch.argsort(group, stable=True)
        ends = torch.nonzero(torch.diff(group[order])).squeeze(1) + 1
        for members in torch.tensor_split(order, ends.cpu()):
            size = min(self.size, len(members) - 1)
            if size > 1:  # one alone has no diversity
                result[members] = set_advantage(reward[members][None], signature[members][None], size)[0]
        return _per_row(result, decisions)


def _per_row(values: Tensor, decisions: Decisions) -> Tensor:
    """One value per trajectory, in order of `first_rows` (S,), at each of its rows `(N, 1)`."""
    keys = by_trajectory(decisions).squeeze(1)
    names = keys[first_rows(decisions)]
    order = torch.argsort(names)
    return values[order[torch.searchsorted(names[order], keys)]].unsqueeze(1)
