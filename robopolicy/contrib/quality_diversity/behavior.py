"""Behavior descriptors: a few numbers of an episode that distinguish solutions of a task.

Archives of diverse policies are spread over them, e.g. over the fractions of time that each foot is on the ground. A
step has features; the descriptor of an episode is their last or mean value, scaled to [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.errors import UserError

DESCRIPTOR = "descriptor"
"""Observation with the target descriptor of an episode, and key of `Step.info` with the achieved one."""

SUMMARIES = ("last", "mean")


@dataclass(frozen=True)
class BehaviorDescriptor:
    """Features of a step, and their aggregation over an episode."""

    names: tuple[str, ...]  # one per feature, with units
    low: Sequence[float]  # value that becomes 0
    high: Sequence[float]  # value that becomes 1
    summary: str = "last"  # last | mean, over the steps of an episode

    def __post_init__(self) -> None:
        sizes = {len(self.names), len(self.low), len(self.high)}
        if len(sizes) != 1 or not self.names or any(a >= b for a, b in zip(self.low, self.high, strict=False)):
            raise UserError(f"A behavior needs names with low < high, got {self.names}, {self.low}, {self.high}.")
        if self.summary not in SUMMARIES:
            raise UserError(f"A behavior is the last or the mean value of its features, got '{self.summary}'.")

    @property
    def size(self) -> int:
        """Number of features D."""
        return len(self.names)

    def normalize(self, value: Tensor) -> Tensor:
        """Features `(..., D)` of an episode on the scale from 0 to 1, bounded to it."""
        low, high = (torch.as_tensor(bound, dtype=value.dtype, device=value.device) for bound in (self.low, self.high))
        return ((value - low) / (high - low)).clamp(0.0, 1.0)
