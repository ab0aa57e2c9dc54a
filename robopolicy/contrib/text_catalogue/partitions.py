"""Partitions by turn, by source and by a recorded key, and the mean over units."""

from __future__ import annotations

from torch import Tensor

from robopolicy.core.aggregate import mask_weights
from robopolicy.core.decisions import Decisions, by_group, by_unit, pair, unit_numbers
from robopolicy.core.segments import Segments


def unit_mean(loss: Tensor, mask: Tensor | None, decisions: Decisions, length: float = 1.0) -> Tensor:
    """Average over units the mean over their decisions."""
    segments = Segments(by_unit(decisions), mask_weights(loss, mask))
    return segments.mean(loss).sum() / (segments.count > 0).sum().clamp(min=1)


def by_key(decisions: Decisions, *, key: str) -> Tensor:
    """Partition by a recorded id, `extra[key]` int (N,) or (N, T), e.g. a cluster."""
    return decisions.require_extra(key, per_decision=True)


def by_group_unit(decisions: Decisions) -> Tensor:
    """Partition by group and number of the unit (turn or chunk)."""
    return pair(by_group(decisions), unit_numbers(decisions))


def by_group_source(decisions: Decisions) -> Tensor:
    """Partition by group and source."""
    return pair(by_group(decisions), decisions.require("source").unsqueeze(1))
