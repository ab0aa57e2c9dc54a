"""Selectors of the rows of a batch that enter the advantage and the update.

They choose whole trajectories, with all their rows, and never one twice: its rewards would add up.
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
"""`(decisions, generator of random choices) -> row indices (M,)`, in their order."""


def mixed(decisions: Decisions, generator: torch.Generator | None) -> Tensor:
    """Groups whose outcomes differ; from the others nothing can be learned (dynamic sampling, DAPO)."""
    reward = outcome(decisions)
    segments = Segments(by_group(decisions), torch.ones_like(reward, dtype=torch.bool))
    return torch.nonzero(segments.broadcast(segments.differs(reward)).squeeze(1)).squeeze(1)


def successes(decisions: Decisions, generator: torch.Generator | None, *, above: float = 0.0) -> Tensor:
    """Trajectories with an outcome `above` a threshold (rejection sampling)."""
    return torch.nonzero(outcome(decisions).squeeze(1) > above).squeeze(1)


SELECTORS: Registry[Callable[..., object]] = Registry(
    "parts.selector",
    {
        "mixed": mixed,
        "successes": successes,
    },
)


Weight = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> (N, 1) or (N, T)`, composed by product."""


@dataclass(frozen=True)
class ClipCovariance:
    """Drops random decisions among those with the highest entropy cost (Clip-Cov, Cui et al. 2025).

    Candidates have a share in Cov(logp, A) within (`least`, `most`) and are not clipped anyway. Silenced ones keep
    counting in the denominator of the aggregation, which is why this is a weight. For the level "token".
    """

    share: Fraction = 2e-4  # of all decisions; at least one where it is positive
    least: NonNegative = 1.0
    most: NonNegative = 5.0
    low: NonNegative = 0.2  # the surrogate clips at 1 - low ...
    high: NonNegative = 0.2  # ... and 1 + high

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """0 at the dropped decisions, else 1, `(N, T)`; draws from torch's global generator."""
        share = covariance(decisions.logp_old + log_ratio, advantage, decisions)
        ratio = log_ratio.exp()
        clipped = torch.where(advantage < 0, ratio < 1.0 - self.low, ratio > 1.0 + self.high)
        candidate = decisions.valid() & (share > self.least) & (share < self.most) & ~clipped
        picked = topk_mask(torch.rand_like(share), candidate, count_for_fraction(decisions.valid(), self.share))
        return torch.where(picked, 0.0, 1.0).to(share)


WEIGHTS: Registry[Callable[..., object]] = Registry(
    "parts.weight",
    {
        "clip_covariance": ClipCovariance,
    },
)


MaskRule = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> bool (N, T)`, True where the decision enters."""


def compose(rules: Sequence[MaskRule], decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor | None:
    """Product of the validity mask and all rules `(N, T)`; None where nothing is masked.

    The validity mask holds the decisions the policy really took: not prompt, tool output or padding. Masked decisions
    leave the numerator and the denominator of the aggregation. A rule finds in `decisions.mask` what those before it
    kept, so that a share is one of these.
    """
    keep = None if decisions.mask is None else decisions.valid()
    for rule in rules:
        chosen = rule(decisions, advantage, log_ratio)
        keep = chosen if keep is None else keep & chosen
        decisions = decisions.with_fields(mask=keep)
    return keep
