"""Signals that several parts read: how uncertain a decision was, and how its probability goes with its advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions


def covariance(logp: Tensor, advantage: Tensor, decisions: Decisions) -> Tensor:
    """Share `(N, T)` of each decision in Cov(logp, A) over the batch, `(logp - mean) (A - mean)` (S066).

    Its mean, times the step size, is about how fast the entropy of a softmax policy falls. 0 where the mask is off.
    """
    mask = decisions.valid()
    advantage = advantage.expand_as(logp)
    product = (logp - masked_mean(logp, mask)) * (advantage - masked_mean(advantage, mask))
    return product.masked_fill(~mask, 0.0)


def share_count(mask: Tensor, share: float) -> int:
    """Number of entries in a share of the masked ones: rounded down, but at least one where the share is positive."""
    total = int(mask.sum())
    return min(max(int(share * total), 1), total) if share > 0 else 0


def highest(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """Bool `(N, T)`: the `count` masked entries with the highest values; all where there are fewer."""
    chosen = torch.zeros_like(mask).flatten()
    if count > 0:
        chosen[values.masked_fill(~mask, -torch.inf).flatten().topk(min(count, chosen.numel())).indices] = True
    return chosen.view_as(mask) & mask
