"""Bounds of the ratio that depend on the entropy or the probability of a decision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, PositiveInt
from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import Bound


def relative_entropy(decisions: Decisions, quantile: float = 0.8, *, logarithm: bool = True) -> Tensor:
    """Scale the entropy of each decision `(N, T)` to [-1, 1], with 0 at the quantile of the batch.

    Args:
        decisions: Batch with `entropy`; masked entries are 0.
        quantile: Share of decisions below 0 (HAPO, Liu et al. 2025).
        logarithm: Use the logarithm of the entropy, for discrete choices; False for densities, whose entropy may be
            negative and is already the logarithm of a width.
    """
    mask, entropy = decisions.valid(), decisions.require("entropy")
    level = entropy.clamp(min=1e-6).log() if logarithm else entropy
    if not bool(mask.any()):
        return torch.zeros_like(level)
    offset = level - torch.quantile(level[mask], quantile)
    above, below = offset[mask].max().clamp(min=1e-9), (-offset[mask].min()).clamp(min=1e-9)
    return torch.where(offset > 0, offset / above, offset / below).masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class ProbabilityBounds:
    """Bounds that widen for unlikely decisions: a fixed share of the probability would barely move them.

    Source: DCPO, Yang et al. 2025.

    With q the old probability they are `(1 + sqrt(1 -+ 4 width / q)) / 2`, so that q times the change of the ratio
    times the ratio stays within the width. Densities are converted to one dimension and clamped to 1.
    """

    low: NonNegative = 0.16
    high: NonNegative = 0.2
    limit: NonNegative = 10.0  # highest upper bound
    dims: PositiveInt = 1  # dimensions of a decision

    def __call__(self, decisions: Decisions) -> tuple[Bound, Bound]:
        """Compute bounds `(N, T)` from the recorded log-probabilities."""
        scarcity = (-decisions.logp_old / self.dims).clamp(min=0.0, max=30.0).exp()  # 1 / q
        lowest = 0.5 + 0.5 * (1.0 - 4.0 * self.low * scarcity).clamp(min=0.0).sqrt()
        return lowest, (0.5 + 0.5 * (1.0 + 4.0 * self.high * scarcity).sqrt()).clamp(max=self.limit)


@dataclass(frozen=True)
class EntropyBounds:
    """Bounds that follow the relative entropy h (HAPO, Liu et al. 2025).

    Certain decisions (h < 0) may lose more probability, `low (1 - h)`; uncertain ones may gain more, `high (1 + h)`.
    """

    low: NonNegative = 0.2
    high: NonNegative = 0.2
    quantile: Fraction = 0.8
    logarithm: bool = True  # see `relative_entropy`

    def __call__(self, decisions: Decisions) -> tuple[Bound, Bound]:
        """Compute bounds `(N, T)` from the recorded entropies."""
        level = relative_entropy(decisions, self.quantile, logarithm=self.logarithm)
        return 1.0 - self.low * (1.0 - level.clamp(max=0.0)), 1.0 + self.high * (1.0 + level.clamp(min=0.0))
