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


def relative_entropy(decisions: Decisions, quantile: float = 0.8, *, logarithm: bool = True) -> Tensor:
    """Entropy of each decision `(N, T)` in [-1, 1]: 0 at the quantile of the batch, 1 at its highest, -1 at its lowest.

    Args:
        decisions: Gives `entropy`; entries where the mask is off are 0.
        quantile: Share of decisions below 0 (HAPO, S025).
        logarithm: Compare logarithms, for entropies of discrete choices. Those of densities, which may be negative, are
            logarithms of a width already: False takes them as they are.
    """
    mask, entropy = decisions.valid(), decisions.need("entropy")
    level = entropy.clamp(min=1e-6).log() if logarithm else entropy
    if not bool(mask.any()):
        return torch.zeros_like(level)
    offset = level - torch.quantile(level[mask], quantile)
    above, below = offset[mask].max().clamp(min=1e-9), (-offset[mask].min()).clamp(min=1e-9)
    return torch.where(offset > 0, offset / above, offset / below).masked_fill(~mask, 0.0)


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
