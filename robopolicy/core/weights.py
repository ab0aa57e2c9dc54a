"""Weights of decisions or rows in the loss; no gradient flows into them. Sharp choices are masks, not weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import EntropyBounds
from robopolicy.core.signals import covariance, highest, relative_entropy, share_count
from robopolicy.limits import Natural, NotNegative, Share
from robopolicy.plugins import Registry

Weight = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> (N, 1) or (N, T)`, composed by product."""


@dataclass(frozen=True)
class ClipCovariance:
    """Silences a random few of the decisions that cost most entropy (Clip-Cov, S066).

    Candidates have a share in Cov(logp, A) within (`least`, `most`) and are not clipped anyway. Silenced ones keep
    counting in the denominator of the aggregation, which is why this is a weight. For the level "token".
    """

    share: Share = 2e-4  # of all decisions; at least one where it is positive
    least: NotNegative = 1.0
    most: NotNegative = 5.0
    low: NotNegative = 0.2  # the surrogate clips at 1 - low ...
    high: NotNegative = 0.2  # ... and 1 + high

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """0 at the silenced decisions, else 1, `(N, T)`; draws from torch's global generator."""
        share = covariance(decisions.logp_old + log_ratio, advantage, decisions)
        ratio = log_ratio.exp()
        clipped = torch.where(advantage < 0, ratio < 1.0 - self.low, ratio > 1.0 + self.high)
        candidate = decisions.valid() & (share > self.least) & (share < self.most) & ~clipped
        picked = highest(torch.rand_like(share), candidate, share_count(decisions.valid(), self.share))
        return torch.where(picked, 0.0, 1.0).to(share)


@dataclass(frozen=True)
class EntropyGate:
    """Factor `1 + beta h` with the relative entropy h of a decision (HAPO, S025).

    Uncertain decisions gain weight only once their ratio has left the inner half of the bounds, certain ones lose it
    only within. The clipped surrogates grow in proportion to the advantage, so the factor may stand outside of them.
    """

    beta: NotNegative = 1.0
    bounds: EntropyBounds = field(default_factory=EntropyBounds)  # those of the surrogate

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Factor `(N, T)`."""
        level = relative_entropy(decisions, self.bounds.quantile, logarithm=self.bounds.logarithm)
        low, high = self.bounds(decisions)
        change = 2.0 * torch.expm1(log_ratio) + 1.0
        inside = (change > low) & (change < high)
        return torch.where((level > 0) != inside, 1.0 + self.beta * level, 1.0)


@dataclass(frozen=True)
class FromSource:
    """1 for the rows of one source, 0 for others, which still count in the denominator of the aggregation."""

    source: Natural = 0

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Factor `(N, 1)`."""
        return (decisions.need("source") == self.source).to(log_ratio.dtype).unsqueeze(1)


def confidence(decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
    """Current probability `(N, T)` of the decision, for the level "token"; never above 1 where it is a density."""
    return (decisions.logp_old + log_ratio).clamp(max=0.0).exp().masked_fill(~decisions.valid(), 0.0)


WEIGHTS: Registry[Callable[..., object]] = Registry(
    "parts.weight",
    {
        "clip_covariance": ClipCovariance,
        "entropy_gate": EntropyGate,
        "confidence": confidence,
        "from_source": FromSource,
    },
)
