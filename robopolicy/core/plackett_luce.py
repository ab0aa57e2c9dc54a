"""Rankings as decisions: the Plackett-Luce distribution over orders of K items with scores (S050).

Each pick is one decision among the items left, so that a ranking of grasps, plans or passages is a row of K decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probability(scores: Tensor, order: Tensor) -> Tensor:
    """Log-probability `(N, K)` of each pick; their sum is that of the ranking.

    Args:
        scores: (N, K) of the items.
        order: (N, K) int, the items from first to last.
    """
    picked = scores.gather(1, order)
    left = torch.flip(torch.logcumsumexp(torch.flip(picked, [1]), 1), [1])
    return picked - left


def draw(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """An order `(N, K)` of the items of each row."""
    gumbel = -torch.empty_like(scores).exponential_(generator=generator).log()
    return torch.argsort(scores + gumbel, dim=1, descending=True)
