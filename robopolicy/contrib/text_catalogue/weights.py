"""Detached factors of the loss of each decision: entropy gates, confidence, source."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, NonNegativeInt
from robopolicy.contrib.text_catalogue.bounds import EntropyBounds, relative_entropy
from robopolicy.core.decisions import Decisions


@dataclass(frozen=True)
class EntropyGate:
    """Factor `1 + beta h` with the relative entropy h of a decision (HAPO, Liu et al. 2025).

    Uncertain decisions gain weight only if their ratio is outside the inner half of the bounds, certain ones lose
    weight only inside. Clipped surrogates are proportional to the advantage, so the factor can be applied outside of
    them.
    """

    beta: NonNegative = 1.0
    bounds: EntropyBounds = field(default_factory=EntropyBounds)  # of the surrogate

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the factor `(N, T)`."""
        level = relative_entropy(decisions, self.bounds.quantile, logarithm=self.bounds.logarithm)
        low, high = self.bounds(decisions)
        change = 2.0 * torch.expm1(log_ratio) + 1.0
        inside = (change > low) & (change < high)
        return torch.where((level > 0) != inside, 1.0 + self.beta * level, 1.0)


@dataclass(frozen=True)
class SourceWeight:
    """1 for the rows of one source, 0 for others, which still count in the denominator of the aggregation."""

    source: NonNegativeInt = 0

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the factor `(N, 1)`."""
        return (decisions.require("source") == self.source).to(log_ratio.dtype).unsqueeze(1)


def confidence(decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
    """Compute the current probability `(N, T)` of the decision, for the level "token"; densities are clamped to 1."""
    return (decisions.logp_old + log_ratio).clamp(max=0.0).exp().masked_fill(~decisions.valid(), 0.0)
