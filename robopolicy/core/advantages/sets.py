"""Sets of rollouts as the unit of judgement: mean return times diversity, and each member's part in it (S060)."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor


def set_values(returns: Tensor, ways: Tensor, subsets: Tensor) -> Tensor:
    """Mean return times the share of different ways, of each of `subsets` `(S, n)` of V rollouts: `(G, S)`.

    Args:
        returns: (G, V).
        ways: (G, V) equal numbers for equal ways; a set of one way alone is worth nothing.
        subsets: (S, n) members.
    """
    order = torch.sort(ways[:, subsets], -1)[0]
    different = 1 + (torch.diff(order) != 0).sum(-1)
    share = torch.where(different > 1, different / subsets.shape[1], 0.0)
    return returns[:, subsets].mean(-1) * share


def set_advantage(returns: Tensor, ways: Tensor, members: int) -> Tensor:
    """Mean value of the sets with a rollout minus that of the sets without it, `(G, V)`."""
    count = returns.shape[1]
    subsets = torch.tensor(list(combinations(range(count), members)), device=returns.device)
    values = set_values(returns, ways, subsets).to(returns.dtype)
    inside = torch.zeros(len(subsets), count, dtype=returns.dtype, device=returns.device).scatter_(1, subsets, 1.0)
    return values @ inside / inside.sum(0) - values @ (1 - inside) / (1 - inside).sum(0)
