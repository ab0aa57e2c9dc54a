"""Stages that multiply the advantage by a factor (`factors.py`), or add a bonus (`bonuses.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import FractionBelowOne, NonNegative
from robopolicy.core.advantage import valid_entries
from robopolicy.core.decisions import Decisions


@dataclass(frozen=True)
class Modulate:
    """Multiply all entries, or the entries of one sign, by a factor of the batch."""

    factor: Callable[[Decisions], Tensor]  # -> (N, 1) or (N, T)
    where: str = "all"  # "all" | "positive" | "negative"

    def __post_init__(self) -> None:
        if self.where not in ("all", "positive", "negative"):
            raise ValueError(f"Modulate where must be 'all', 'positive' or 'negative', got {self.where!r}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Modulate the advantage."""
        scaled = advantage * self.factor(decisions)
        if self.where == "all":
            return scaled
        return torch.where(advantage > 0 if self.where == "positive" else advantage < 0, scaled, advantage)


@dataclass(frozen=True)
class Shape:
    """Add a bonus, bounded in absolute terms (`limit`) and relative to the advantage (`fraction`).

    A `fraction` below 1 keeps the sign of every advantage; a pipeline therefore rejects a baseline after it. An
    unbounded bonus with non-zero mean shifts token means towards long rows; centre again after it.
    """

    bonus: Callable[[Decisions], Tensor]  # -> (N, 1) or (N, T)
    limit: NonNegative | None = None
    fraction: FractionBelowOne | None = None  # in [0, 1)

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Shape the advantage."""
        bonus = self.bonus(decisions)
        if self.limit is not None:
            bonus = bonus.clamp(-self.limit, self.limit)
        if self.fraction is not None:
            bound = self.fraction * advantage.abs()
            bonus = torch.minimum(torch.maximum(bonus, -bound), bound)
        return (advantage + bonus).masked_fill(~valid_entries(advantage + bonus, decisions), 0.0)
