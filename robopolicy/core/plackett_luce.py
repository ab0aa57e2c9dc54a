"""Rankings and sets as decisions: the Plackett-Luce distribution over orders of K items with scores (S050, S034).

Each pick is one decision among the items left, so that a ranking of grasps, plans or passages is a row of K decisions.
The first n picks are a set of n items: of the observation tokens that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probability(scores: Tensor, order: Tensor) -> Tensor:
    """Log-probability `(N, n)` of each pick; their sum is that of the ranking, or of its beginning.

    Args:
        scores: (N, K) of the items.
        order: (N, n) int, the items from first to last, or the first n <= K of them.
    """
    picked = scores.gather(1, order)
    left = torch.flip(torch.logcumsumexp(torch.flip(picked, [1]), 1), [1])
    if order.shape[1] < scores.shape[1]:
        others = torch.ones_like(scores, dtype=torch.bool).scatter(1, order, False)
        never = scores.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
        left = torch.logaddexp(left, never)
    return picked - left
