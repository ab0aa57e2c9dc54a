"""Reference policies: what a policy is held near to, as parameters and as log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def restricted(logits: Tensor, support: Tensor) -> Tensor:
    """Log-probabilities `(..., V)` of the policy renormalised on a support, bool `(..., V)`; -inf outside."""
    return logits.masked_fill(~support, -torch.inf).log_softmax(-1)


def top_p_support(logits: Tensor, p: float) -> Tensor:
    """Support of NLPO (S083), bool `(..., V)`: the likeliest choices that together have a probability of at least `p`.

    Of the logits of a lagged copy of the policy; the same support then restricts both sampling and scoring.
    """
    probability, order = logits.softmax(-1).sort(dim=-1, descending=True)
    before = probability.cumsum(-1) - probability
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before < p)
