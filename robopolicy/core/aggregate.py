"""Aggregation of a loss per decision to a scalar, including the length normalisation of each method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, by_trajectory, by_unit
from robopolicy.core.segments import Segments
from robopolicy.plugins import Registry

Aggregate = Callable[[Tensor, Tensor | None, Decisions, float], Tensor]
"""`(loss (N, T), mask (N, T) or None, decisions, length) -> scalar`; only "fixed_length" uses `length`."""


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the entries whose mask is on; 0 where there is none. Values of masked entries are ignored.

    Bools count as 0 and 1.
    """
    if mask is None:
        return values.mean(dtype=torch.get_default_dtype() if values.dtype == torch.bool else None)
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def token_mean(loss: Tensor, mask: Tensor | None, decisions: Decisions, length: float = 1.0) -> Tensor:
    """Mean over all valid decisions of the batch."""
    return masked_mean(loss, mask)


def sequence_sum(loss: Tensor, mask: Tensor | None, decisions: Decisions, length: float = 1.0) -> Tensor:
    """Mean over trajectories of the sum over their decisions."""
    totals, counts = _per_trajectory(loss, mask, decisions)
    return totals.sum() / (counts > 0).sum().clamp(min=1)


def sequence_mean(loss: Tensor, mask: Tensor | None, decisions: Decisions, length: float = 1.0) -> Tensor:
    """Mean over trajectories of the mean over their decisions."""
    totals, counts = _per_trajectory(loss, mask, decisions)
    return (totals / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def unit_sum(loss: Tensor, mask: Tensor | None, decisions: Decisions, length: float = 1.0) -> Tensor:
    """Mean over units (chunks, turns) of the sum over their decisions."""
    segments = Segments(by_unit(decisions), mask_weights(loss, mask))
    return segments.sum(loss).sum() / (segments.count > 0).sum().clamp(min=1)


def fixed_length(loss: Tensor, mask: Tensor | None, decisions: Decisions, length: float = 1.0) -> Tensor:
    """Mean over trajectories of the sum over their decisions, divided by a fixed `length` (Dr. GRPO)."""
    return sequence_sum(loss, mask, decisions) / length


AGGREGATES: Registry[Aggregate] = Registry(
    "parts.aggregate",
    {
        "token_mean": token_mean,
        "sequence_sum": sequence_sum,
        "sequence_mean": sequence_mean,
        "unit_sum": unit_sum,
        "fixed_length": fixed_length,
    },
)


def mask_weights(loss: Tensor, mask: Tensor | None) -> Tensor:
    """The mask in the dtype of the loss `(N, T)`; ones if it is None."""
    return loss.new_ones(loss.shape) if mask is None else mask.to(loss.dtype)


def _per_trajectory(loss: Tensor, mask: Tensor | None, decisions: Decisions) -> tuple[Tensor, Tensor]:
    """Sum of the loss and number of decisions of each trajectory, both (S,)."""
    weights = mask_weights(loss, mask)
    if decisions.trajectory is not None:
        segments = Segments(by_trajectory(decisions), weights)
        return segments.sum(loss), segments.count
    return (loss if mask is None else loss.masked_fill(~mask, 0.0)).sum(1), weights.sum(1)
