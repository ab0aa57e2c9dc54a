"""Selectors of rows, weights of decisions and mask rules.

Selectors choose whole trajectories with all their rows, and no trajectory twice, because its rewards would add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions, by_group
from robopolicy.core.ratios import count_for_fraction, covariance, topk_mask
from robopolicy.core.segments import Segments
from robopolicy.plugins import Registry

Selector = Callable[[Decisions, torch.Generator | None], Tensor]
"""`(decisions, generator) -> row indices (M,)`, in ascending order."""


def mixed(decisions: Decisions, generator: torch.Generator | None) -> Tensor:
    """Select groups with different outcomes; the others have no advantage (dynamic sampling, DAPO)."""
    reward = outcome(decisions)
    segments = Segments(by_group(decisions), decisions.valid().any(1, keepdim=True))
    return torch.nonzero(segments.broadcast(segments.differs(reward)).squeeze(1)).squeeze(1)


def successes(decisions: Decisions, generator: torch.Generator | None, *, above: float = 0.0) -> Tensor:
    """Select trajectories with an outcome `above` a threshold (rejection sampling)."""
    return torch.nonzero(outcome(decisions).squeeze(1) > above).squeeze(1)


SELECTORS: Registry[Callable[..., object]] = Registry("parts.selector", {"mixed": mixed, "successes": successes})


Weight = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> (N, 1) or (N, T)`, composed by product."""


@dataclass(frozen=True)
class ClipCovariance:
    """Drop random decisions with a high covariance of log-probability and advantage (Clip-Cov, Cui et al. 2025).

    Candidates contribute between `least` and `most` to Cov(logp, A) and are not clipped. Dropped decisions count in the
    denominator of the aggregation, so this is a weight and not a mask. For the level "token".
    """

    share: Fraction = 2e-4  # of all decisions; at least one if positive
    least: NonNegative = 1.0
    most: NonNegative = 5.0
    low: NonNegative = 0.2  # the surrogate clips at 1 - low ...
    high: NonNegative = 0.2  # ... and 1 + high

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Weights `(N, T)`, 0 at dropped decisions, else 1; draws from torch's global generator."""
        part = covariance(decisions.logp_old + log_ratio, advantage, decisions)
        ratio = log_ratio.exp()
        clipped = torch.where(advantage < 0, ratio < 1.0 - self.low, ratio > 1.0 + self.high)
        candidate = decisions.valid() & (part > self.least) & (part < self.most) & ~clipped
        picked = topk_mask(torch.rand_like(part), candidate, count_for_fraction(decisions.valid(), self.share))
        return torch.where(picked, 0.0, 1.0).to(part)


WEIGHTS: Registry[Callable[..., object]] = Registry("parts.weight", {"clip_covariance": ClipCovariance})


MaskRule = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> bool (N, T)`, True where the decision is kept."""


def compose(rules: Sequence[MaskRule], decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor | None:
    """Conjunction of the validity mask and all rules, bool `(N, T)`; None if nothing is masked.

    Masked decisions leave the numerator and the denominator of the aggregation. Each rule receives the result of the
    rules before it as `decisions.mask`, so that fractions refer to the remaining decisions.
    """
    keep = None if decisions.mask is None else decisions.valid()
    for rule in rules:
        chosen = rule(decisions, advantage, log_ratio)
        keep = chosen if keep is None else keep & chosen
        decisions = decisions.with_fields(mask=keep)
    return keep
