"""Interventions of the safety layer: counts, logs and records."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

log = logging.getLogger(__name__)


class SafetyIntervention(NamedTuple):
    """One intervention of the safety layer."""

    kind: str  # position | velocity | acceleration | ... | stale | gate | estop | ...
    joint: str  # name of the joint, camera or observation; empty for all
    value: float  # requested or measured value
    limit: float  # allowed value
    time: float  # [s, monotonic]

    def __str__(self) -> str:
        where = f" of {self.joint}" if self.joint else ""
        if math.isnan(self.value):
            return f"{self.kind}{where}"
        return f"{self.kind}{where}: {self.value:.6g}, allowed {self.limit:.6g}"


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
