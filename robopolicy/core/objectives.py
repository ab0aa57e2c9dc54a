"""Objectives that see whole groups at once: preferences, positives against negatives, sets against sets."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.decisions import Decisions

Objective = Callable[[Decisions, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""`(decisions, advantage (N, 1 or T), logp (N, T)) -> (loss, detached scalars)`; a minibatch holds whole groups."""

OBJECTIVES: dict[str, Objective] = {}
