"""Weights of decisions or rows in the loss; no gradient flows into them. Sharp choices are masks, not weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.decisions import Decisions

Weight = Callable[[Decisions, Tensor, Tensor], Tensor]
"""`(decisions, advantage (N, 1 or T), log_ratio (N, T) detached) -> (N, 1) or (N, T)`, composed by product."""

WEIGHTS: dict[str, Weight] = {}
