"""Sampling of rankings from the Plackett-Luce distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample an order `(N, K)` of the items of each row."""
    gumbel = -torch.empty_like(scores).exponential_(generator=generator).log()
    return torch.argsort(scores + gumbel, dim=1, descending=True)
