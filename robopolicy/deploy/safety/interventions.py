"""Record of the interventions of the safety layer: counted, logged and kept."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SafetyIntervention:
    """One intervention of the safety layer."""

    kind: str  # position | velocity | acceleration | ... | stale | gate | estop | ...
    joint: str  # name of the joint, camera or observation; empty for all
    value: float  # requested or measured value
    limit: float  # allowed value
    time: float  # [s] on the monotonic clock

    def __str__(self) -> str:
        where = f" of {self.joint}" if self.joint else ""
        if math.isnan(self.value):
            return f"{self.kind}{where}"
        return f"{self.kind}{where}: {self.value:.6g}, allowed {self.limit:.6g}"


class InterventionLog:
    """Counter of interventions, which logs the first of each kind and joint within a second.

    Args:
        window: Ticks of `limited_fraction`.
        keep: Maximum number of records in `recent`.
    """

    def __init__(self, window: int = 100, max_records: int = 1000) -> None:
        self.counts: Counter[str] = Counter()
        self.ticks = 0
        self.recent: deque[SafetyIntervention] = deque(maxlen=max_records)
        self._window = window
        self._bent: deque[bool] = deque(maxlen=window)
        self._logged: dict[tuple[str, str], float] = {}

    def tick(self, interventions: Iterable[SafetyIntervention]) -> None:
        """Record the interventions of the filter in one tick."""
        found = tuple(interventions)
        self.ticks += 1
        self._bent.append(bool(found))
        for intervention in found:
            self.add(intervention)

    def add(self, intervention: SafetyIntervention) -> None:
        """Record one intervention outside of a tick."""
        self.counts[intervention.kind] += 1
        self.recent.append(intervention)
        key = (intervention.kind, intervention.joint)
        if intervention.time - self._logged.get(key, -math.inf) >= 1.0:
            self._logged[key] = intervention.time
            log.warning("%s (number %d of its kind)", intervention, self.counts[intervention.kind])

    @property
    def limited_fraction(self) -> float:
        """Fraction of the last `window` ticks in which the filter changed a command; 0 for fewer ticks."""
        return sum(self._bent) / self._window if len(self._bent) == self._window else 0.0

    def reset_window(self) -> None:
        """Clear the window of `limited_fraction`, after a pause."""
        self._bent.clear()
