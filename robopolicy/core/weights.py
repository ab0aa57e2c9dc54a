"""Weights of decisions or rows in the loss; no gradient flows into them. Sharp choices are masks, not weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.signals import chosen_count, covariance, relative_entropy, top_share

Weight = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> (N, 1) or (N, T)`, composed by product."""


@dataclass(frozen=True)
class ClipCovariance:
    """Silences a random few of the decisions that cost most entropy (Clip-Cov, S066).

    Candidates have a share in Cov(logp, A) within (`least`, `most`) and are not clipped anyway. Silenced ones keep
    counting in the denominator of the aggregation, which is why this is a weight. For the level "token".
    """

    share: float = 2e-4  # of all decisions; at least one where it is positive
    least: float = 1.0
    most: float = 5.0
    low: float = 0.2  # the surrogate clips at 1 - low ...
    high: float = 0.2  # ... and 1 + high

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """0 at the silenced decisions, else 1, `(N, T)`; draws from torch's global generator."""
        share = covariance(decisions.logp_old + log_ratio, advantage, decisions)
        ratio = log_ratio.exp()
        clipped = torch.where(advantage < 0, ratio < 1.0 - self.low, ratio > 1.0 + self.high)
        candidate = (share > self.least) & (share < self.most) & ~clipped
        count = min(chosen_count(decisions.valid(), self.share), int(candidate.sum()))
        picked = top_share(torch.rand_like(share), candidate, count / max(int(candidate.sum()), 1))
        return torch.where(picked, 0.0, 1.0).to(share)


@dataclass(frozen=True)
class EntropyGate:
    """Factor `1 + beta h` with the relative entropy h of a decision (HAPO, S025).

    Uncertain decisions gain weight only once their ratio has left the inner half of the bounds, certain ones lose it
    only within. The surrogates grow in proportion to the advantage, so the factor may stand outside of them.
    """

    beta: float = 1.0
    low: float = 0.2  # the inner half of the bounds is [1 - low / 2, 1 + high / 2]
    high: float = 0.2
    quantile: float = 0.8
    logarithm: bool = True  # see `relative_entropy`

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Factor `(N, T)`."""
        level = relative_entropy(decisions, self.quantile, logarithm=self.logarithm)
        change = torch.expm1(log_ratio)
        inside = (change > -0.5 * self.low) & (change < 0.5 * self.high)
        return torch.where((level > 0) != inside, 1.0 + self.beta * level, 1.0)


def confidence(decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
    """Current probability `(N, T)` of the decision, for the level "token"; never above 1 where it is a density."""
    return (decisions.logp_old + log_ratio).clamp(max=0.0).exp()


WEIGHTS: dict[str, Callable[..., object]] = {
    "clip_covariance": ClipCovariance,
    "entropy_gate": EntropyGate,
    "confidence": confidence,
}
