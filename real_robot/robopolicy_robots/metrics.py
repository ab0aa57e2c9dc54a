"""Live metrics of a run for the terminal and the browser."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from robopolicy_robots.robot import RobotSpec
from robopolicy_robots.states import Tick

WINDOW = 250  # ticks for rates and periods
LINES = 5  # maximum number of episodes and interventions to list


class RunMetrics:
    """Metrics of the newest tick and of the timing of the last ticks."""

    def __init__(self, robot: RobotSpec, task: str) -> None:
        self.robot, self.task = robot, task
        self.episodes: deque[str] = deque(maxlen=LINES)  # finished episodes, one line each
        self._status: Mapping[str, Any] = {}
        self._tick_times: deque[float] = deque(maxlen=WINDOW + 1)  # [s] start times of ticks
        self._recent: deque[str] = deque(maxlen=LINES)

    def update(self, status: Mapping[str, Any], tick: Tick) -> None:
        """Update after a tick with the `status` of the control loop."""
        if status["ticks"] < self._status.get("ticks", 0):  # a new loop for the next episode
            self._tick_times.clear()
        self._status = status
        self._tick_times.append(tick.now)
        self._recent.extend(map(str, tick.interventions))

    def snapshot(self) -> dict[str, Any]:
        """Current metrics as plain values: seconds, Hz, counts; None if unknown."""
        status, robot = self._status, self.robot
        periods = np.diff(self._tick_times)
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
            "target_rate": robot.rate,
            "period_p50": p50,
            "period_p99": p99,
            "jitter": float(np.quantile(np.abs(periods - robot.dt), 0.99)) if known else None,
            "latency": status.get("latency", 0.0),
            "remaining": status.get("remaining", 0.0),
            "limited": status.get("limited", 0.0),
            "interventions": dict(status.get("interventions", {})),
            "recent": list(self._recent),
            "ages": {key: [age, robot.deadline(key)] for key, age in status.get("ages", {}).items()},
            "episodes": list(self.episodes),
        }
