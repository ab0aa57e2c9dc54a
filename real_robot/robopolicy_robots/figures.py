"""The figures of a run while it goes on, counted once for everyone who shows them: the terminal and the browser."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from robopolicy_robots.robot import RobotSpec
from robopolicy_robots.states import Tick

WINDOW = 250  # ticks over which rates and periods are taken
LINES = 5  # episodes and interventions that are remembered as text


class Figures:
    """What the newest tick was like, and how the last ones followed each other."""

    def __init__(self, robot: RobotSpec, task: str) -> None:
        self.robot, self.task = robot, task
        self.played: deque[str] = deque(maxlen=LINES)  # episodes that are over, a line each
        self._status: Mapping[str, Any] = {}
        self._moments: deque[float] = deque(maxlen=WINDOW + 1)  # [s] when ticks began
        self._recent: deque[str] = deque(maxlen=LINES)

    def update(self, status: Mapping[str, Any], tick: Tick) -> None:
        """A tick is over; `status` is what the control loop says of itself."""
        if status["ticks"] < self._status.get("ticks", 0):  # another episode, hence another loop
            self._moments.clear()
        self._status = status
        self._moments.append(tick.now)
        self._recent.extend(map(str, tick.interventions))

    def snapshot(self) -> dict[str, Any]:
        """Everything worth showing, as plain values: seconds, Hz, counts; None where nothing is known yet."""
        status, robot = self._status, self.robot
        periods = np.diff(self._moments)
        known = len(periods) > 1 and periods.mean() > 0
        p50, p99 = (float(np.quantile(periods, share)) if known else None for share in (0.5, 0.99))
        return {
            "robot": robot.name,
            "task": self.task,
            "state": status.get("state", ""),
            "reason": status.get("reason", ""),
            "ticks": status.get("ticks", 0),
            "missed": status.get("overruns", 0),
            "rate": float(1.0 / periods.mean()) if known else None,
            "wanted_rate": robot.rate,
            "period_p50": p50,
            "period_p99": p99,
            "jitter": float(np.quantile(np.abs(periods - robot.dt), 0.99)) if known else None,
            "latency": status.get("latency", 0.0),
            "remaining": status.get("remaining", 0.0),
            "limited": status.get("limited", 0.0),
            "interventions": dict(status.get("interventions", {})),
            "recent": list(self._recent),
            "ages": {key: [age, robot.deadline(key)] for key, age in status.get("ages", {}).items()},
            "played": list(self.played),
        }
