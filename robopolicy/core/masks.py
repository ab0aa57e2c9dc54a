"""Mask rules: which decisions enter the loss. Rules are composed by product; soft factors are weights, not masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.signals import top_share

MaskRule = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> bool (N, T)`, True where the decision enters."""


def compose(rules: Sequence[MaskRule], decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor | None:
    """Product of the validity mask and all rules `(N, T)`; None where nothing is masked.

    The validity mask holds the decisions the policy really took: not prompt, tool output or padding. Masked decisions
    leave the numerator and the denominator of the aggregation.
    """
    keep = None if decisions.mask is None else decisions.valid()
    for rule in rules:
        chosen = rule(decisions, advantage, log_ratio)
        keep = chosen if keep is None else keep & chosen
    return keep


@dataclass(frozen=True)
class DepthRange:
    """Keep decisions with depth in [first, last), e.g. the trained denoising steps or the first turns."""

    first: int = 0
    last: int | None = None

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        depth = decisions.depths()
        keep = depth >= self.first
        return keep if self.last is None else keep & (depth < self.last)


@dataclass(frozen=True)
class RatioOutlier:
    """Drop decisions whose log-ratio lies beyond `limit` nats in either direction."""

    limit: float = 5.0

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return log_ratio.abs() <= self.limit


@dataclass(frozen=True)
class Unmarked:
    """Drop decisions marked in `extra[key]`, bool (N, T): e.g. the choice of a mode while its skills are refined."""

    key: str

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return ~decisions.need_extra(self.key, per_decision=True)


@dataclass(frozen=True)
class Source:
    """Keep rows of one source, e.g. 0 for those the policy itself drew."""

    source: int

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return (decisions.need("source") == self.source).unsqueeze(1).expand(decisions.shape)


@dataclass(frozen=True)
class Informative:
    """Keep the share of decisions with the largest `|A| H`: uncertain, and with something at stake (D3S, S012)."""

    share: float = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        stake = advantage.abs() * decisions.need("entropy")
        return top_share(stake.expand(decisions.shape), decisions.valid(), self.share)


MASKS: dict[str, Callable[..., MaskRule]] = {
    "depth_range": DepthRange,
    "informative": Informative,
    "ratio_outlier": RatioOutlier,
    "source": Source,
    "unmarked": Unmarked,
}
