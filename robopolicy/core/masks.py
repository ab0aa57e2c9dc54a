"""Mask rules: which decisions enter the loss. Rules are composed by product; soft factors are weights, not masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from robopolicy.core.decisions import Decisions

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
