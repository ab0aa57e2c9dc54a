"""Optimism of an ensemble, and the rule by which an actor changes rarely the critic that it climbs (S094)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from robopolicy.errors import UserError


def upper_value(values: Tensor, quantile: float) -> Tensor:
    """Quantile `(...)` over the members of `values` `(M, ...)`: 1 is the most hopeful one, 0.5 the median.

    Where members have seen the same they agree, elsewhere the quantile lies above their mean.
    """
    return values.amax(0) if quantile == 1 else values.quantile(quantile, dim=0)


class RareSwitch:
    """Says when a critic that was kept fits the data so much worse than the current one that it must go.

    It stays while `kept <= factor * current + slack`, both Bellman errors averaged over the last measurements.
    """

    def __init__(self, factor: float, slack: float, *, memory: float = 0.0, dwell: int = 0) -> None:
        """Start with a critic that has just been changed.

        Args:
            factor: Largest ratio of the errors, more than 1.
            slack: Excess that is allowed besides, squared units of value.
            memory: Share of the average that every measurement keeps; 0 trusts the last one alone.
            dwell: Measurements at least between two changes.
        """
        if factor <= 1 or slack < 0 or not 0 <= memory < 1 or dwell < 0:
            raise UserError(
                "A rare switch needs factor > 1, slack >= 0, memory in [0, 1) and dwell >= 0, got "
                f"{factor}, {slack}, {memory} and {dwell}."
            )
        self.factor, self.slack, self.memory, self.dwell = factor, slack, memory, dwell
        self.kept = self.current = 0.0  # averages of the errors
        self.seen = 0  # measurements since the last change
        self.changes = 0

    def due(self, kept: float, current: float) -> bool:
        """Note the errors of both critics; whether it is time to change, which also begins anew."""
        share = max(1.0 - self.memory, 1.0 / (self.seen + 1))  # a plain mean at first
        self.kept += share * (kept - self.kept)
        self.current += share * (current - self.current)
        self.seen += 1
        if self.seen <= self.dwell or self.kept <= self.factor * self.current + self.slack:
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
