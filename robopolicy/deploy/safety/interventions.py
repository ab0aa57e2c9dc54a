"""Interventions of the safety layer: counts, logs and records."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

UNITS = {  # kind -> unit of its numbers, where {} is the unit of the position of the joint
    "position": "{}",
    "lead": "{}",
    "step": "{}",
    "braking": "{}",
    "velocity": "{}/s",
    "lag": "{}/s",
    "acceleration": "{}/s^2",
    "jerk": "{}/s^3",
}
MEANINGS = {  # kind -> sentence for reports
    "measurement": "a measurement was infinite, so the robot braked",
    "shape": "the command was not one number per joint, so the robot braked",
    "finite": "the command had numbers that are not finite, so the robot braked",
    "position": "the target was outside of the position limits and was moved to the nearest limit",
    "lead": "the target was too far from the measured position (max_lead) and was moved nearer to it",
    "velocity": "the target needed more than the velocity limit, so the command moved less",
    "step": "the target needed more than max_step in one tick, so the command moved less",
    "acceleration": "the target needed more than the acceleration limit, so the command moved less",
    "jerk": "the target needed more than the jerk limit, so the command moved less",
    "lag": "the command was still behind an earlier target and would have overshot, so it moved less",
    "braking": "the joint could not have stopped before a position limit, so the command moved less",
    "effort": "the measured effort was above its limit, so the robot braked",
    "workspace": "the robot would have left the workspace, so the command moved less",
    "stale": "a source had no message within its maximum age, so the robot held",
    "gate": "an observation was out of distribution, so the robot held",
    "support": "an action was out of distribution",
    "estop": "the emergency stop was pressed",
}


def unit_of(kind: str, position: str) -> str:
    """Unit of the numbers of a kind for a joint whose `position` is in rad or m; empty if unknown."""
    if kind == "effort":
        return {"rad": "Nm", "m": "N"}.get(position, "")
    return UNITS[kind].format(position) if kind in UNITS and position else ""


def meaning(kind: str) -> str:
    """Sentence that explains a kind of intervention."""
    return MEANINGS.get(kind, "a request gave no usable chunk" if kind.startswith("policy ") else "")


log = logging.getLogger(__name__)


class SafetyIntervention(NamedTuple):
    """One intervention of the safety layer."""

    kind: str  # position | velocity | acceleration | ... | stale | gate | estop | ...
    joint: str  # name of the joint, camera or observation; empty for all
    value: float  # requested or measured value
    limit: float  # allowed value
    time: float  # [s, monotonic]
    unit: str = ""  # of `value` and `limit`; empty if unknown

    def __str__(self) -> str:
        where = f" of {self.joint}" if self.joint else ""
        if math.isnan(self.value):
            return f"{self.kind}{where}"
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.kind}{where}: {self.value:.6g}{unit}, allowed {self.limit:.6g}{unit}"


class InterventionLog:
    """Log of interventions with counts; writes one log message per second, kind and joint.

    Args:
        window: Number of ticks for `limited_fraction`.
        keep: Maximum number of records in `recent`.
    """

    def __init__(self, window: int = 100, max_records: int = 1000) -> None:
        self.counts: Counter[str] = Counter()
        self.ticks = 0
        self.recent: deque[SafetyIntervention] = deque(maxlen=max_records)
        self._window = window
        self._limited: deque[bool] = deque(maxlen=window)
        self._logged: dict[tuple[str, str], float] = {}

    def tick(self, interventions: Iterable[SafetyIntervention]) -> None:
        """Record the interventions of the filter in one tick."""
        found = tuple(interventions)
        self.ticks += 1
        self._limited.append(bool(found))
        for intervention in found:
            self.add(intervention)

    def add(self, intervention: SafetyIntervention) -> None:
        """Record one intervention."""
        self.counts[intervention.kind] += 1
        self.recent.append(intervention)
        key = (intervention.kind, intervention.joint)
        if intervention.time - self._logged.get(key, -math.inf) >= 1.0:
            self._logged[key] = intervention.time
            log.warning("%s (number %d of its kind)", intervention, self.counts[intervention.kind])

    @property
    def limited_fraction(self) -> float:
        """Fraction of the last `window` ticks with a changed command; 0 for fewer ticks."""
        return sum(self._limited) / self._window if len(self._limited) == self._window else 0.0

    def reset_window(self) -> None:
        """Clear the window of `limited_fraction`, after a pause."""
        self._limited.clear()
