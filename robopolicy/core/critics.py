"""The value function of a recipe: what it is fitted to and how. The network belongs to whoever runs the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions
from robopolicy.limits import Natural, NotNegative


@runtime_checkable
class Fitted(Protocol):
    """A start of advantages that says what its values should have been."""

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Returns `(N, T)` to which `Decisions.value` is fitted, and where, bool `(N, T)`."""
        ...


@dataclass(frozen=True)
class Critic:
    """How values are learned beside the policy; `critic` of a recipe."""

    coef: float = 0.5  # weight of the value loss
    clip: NotNegative = 0.0  # largest change of a value that its loss rewards, as in PPO; 0 disables
    detach: bool = False  # its gradient stops at what it shares with the policy (VL-DAC, S178)
    warmup: Natural = 0  # first updates, in which it learns alone

    def __post_init__(self) -> None:
        if self.coef <= 0 or self.clip < 0 or self.warmup < 0:
            raise ValueError(f"A critic needs coef > 0, clip >= 0 and warmup >= 0, got {self}.")

    def loss(self, value: Tensor, decisions: Decisions, target: Tensor, fitted: Tensor) -> Tensor:
        """Mean squared error, with `clip` the larger one of the value and of one that moved by at most that much.

        Args:
            value: (N, T) under the current parameters.
            decisions: `value` of these is that before the update.
            target: (N, T) returns.
            fitted: (N, T) bool, where there is a target.
        """
        value, target = (entries.masked_fill(~fitted, 0.0) for entries in (value, target))  # for the gradient, too
        error = (value - target).square()
        if self.clip:
            old = decisions.need("value").masked_fill(~fitted, 0.0)
            bounded = old + (value - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (bounded - target).square())
        return masked_mean(error, fitted)
