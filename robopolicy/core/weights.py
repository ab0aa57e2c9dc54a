"""Weights of decisions or rows in the loss; no gradient flows into them. Sharp choices are masks, not weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.signals import covariance, highest, share_count
from robopolicy.limits import NotNegative, Share
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


WEIGHTS: Registry[Callable[..., object]] = Registry(
    "parts.weight",
    {
        "clip_covariance": ClipCovariance,
    },
)
