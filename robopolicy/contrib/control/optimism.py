"""Optimistic values of an ensemble, and a rule for rare changes of the critic that the actor maximises.

Source: Tan et al. 2025, optimistic actor-critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from robopolicy.errors import UserError


def upper_value(values: Tensor, quantile: float) -> Tensor:
    """Quantile `(...)` over the members of `values` `(M, ...)`: 1 is the maximum, 0.5 the median.

    Members agree on inputs of their training data; elsewhere a high quantile exceeds their mean.
    """
    return values.amax(0) if quantile == 1 else values.quantile(quantile, dim=0)


class LazyUpdate:
    """Rule that replaces a kept critic when it fits the data much worse than the current one.

    The critic is kept while `kept <= factor * current + switch_margin`, both running averages of Bellman errors.
    """

    def __init__(
        self, factor: float, switch_margin: float, *, memory: float = 0.0, min_switch_interval: int = 0
    ) -> None:
        """Start with a critic that has just been replaced.

        Args:
            factor: Maximum ratio of the errors, more than 1.
            switch_margin: Additional excess that is allowed, in squared units of value.
            memory: Fraction of the average that every measurement keeps; 0 uses the last measurement only.
            min_switch_interval: Minimum number of measurements between two changes.
        """
        if factor <= 1 or switch_margin < 0 or not 0 <= memory < 1 or min_switch_interval < 0:
            raise UserError(
                "A lazy update needs factor > 1, switch_margin >= 0, memory in [0, 1), min_switch_interval >= 0, got "
                f"{factor}, {switch_margin}, {memory} and {min_switch_interval}."
            )
        self.factor, self.switch_margin = factor, switch_margin
        self.memory, self.min_switch_interval = memory, min_switch_interval
        self.kept = self.current = 0.0  # averages of the errors
        self.seen = 0  # measurements since the last change
        self.changes = 0

    def due(self, kept: float, current: float) -> bool:
        """Record the errors of both critics; return whether to replace the kept one, which also restarts the count."""
        share = max(1.0 - self.memory, 1.0 / (self.seen + 1))  # a plain mean for the first measurements
        self.kept += share * (kept - self.kept)
        self.current += share * (current - self.current)
        self.seen += 1
        if self.seen <= self.min_switch_interval or self.kept <= self.factor * self.current + self.switch_margin:
            return False
        self.seen, self.changes = 0, self.changes + 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Averages and counts."""
        return {"kept": self.kept, "current": self.current, "seen": self.seen, "changes": self.changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.kept, self.current = float(state["kept"]), float(state["current"])
        self.seen, self.changes = int(state["seen"]), int(state["changes"])
