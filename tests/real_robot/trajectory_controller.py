"""A simulated joint_trajectory_controller with the action `FollowJointTrajectory`, for tests."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from robopolicy_robots.messages import JointTrajectory
from robopolicy_robots.transports.actions import ABORTED, CANCELED, SUCCEEDED, GoalTracker, goal_failure

ACTION = "/arm/follow_joint_trajectory"
Finish = Callable[[int, int, str], None]  # status, error code, error text


class TrajectoryController:
    """Follow one goal by linear interpolation; a new goal cancels the one before, and a canceled goal stops at once."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.action, self.names, self._clock = ACTION, tuple(names), clock
        self.goals: list[JointTrajectory] = []  # accepted
        self.canceled: list[str] = []  # ids
        self.rejects = False
        self.starts: list[NDArray[np.float64]] = []  # position at the start of each goal
        self._position = np.zeros(len(self.names))
        self._running: tuple[str, float, Finish] | None = None  # id and time of the start of the goal
        self._lock = threading.RLock()

    def execute(self, goal: str, trajectory: JointTrajectory, finish: Finish) -> bool:
        """Accept or reject a goal."""
        with self._lock:
            times = [point.time_from_start.seconds for point in trajectory.points]
            if self.rejects or trajectory.joint_names != self.names or not times or (np.diff(times) <= 0).any():
                return False
            self.update()
            self._finish(CANCELED, -1, "Current goal cancelled due to new incoming action.")
            self.goals.append(trajectory)
            self.starts.append(self._position)
            self._running = goal, self._clock(), finish
            return True

    def cancel(self, goal: str) -> None:
        """Cancel a goal if it is running."""
        with self._lock:
            self.update()
            self.canceled.append(goal)
            if self._running is not None and self._running[0] == goal:
                self._finish(CANCELED, 0, "")

    def abort(self, code: int, text: str) -> None:
        """Abort the running goal."""
        with self._lock:
            self.update()
            self._finish(ABORTED, code, text)

    @property
    def busy(self) -> bool:
        """Whether a goal is running."""
        return self._running is not None

    def update(self, ahead: float = 0.0) -> NDArray[np.float64]:
        """Return the position `ahead` seconds from now, and end a goal that is reached by then."""
        with self._lock:
            if self._running is not None:
                points, since = self.goals[-1].points, self._clock() + ahead - self._running[1]
                times = [0.0, *(point.time_from_start.seconds for point in points)]
                path = np.stack([self.starts[-1], *(point.positions for point in points)])
                self._position = np.array([np.interp(since, times, joint) for joint in path.T])
                if since >= times[-1] - 1e-9:
                    self._finish(SUCCEEDED, 0, "")
            return self._position

    def _finish(self, status: int, code: int, text: str) -> None:
        if self._running is not None:
            _, _, finish = self._running
            self._running = None
            finish(status, code, text)


class DirectClient(GoalTracker):
    """A client of a controller in the same process."""

    matched = 1

    def __init__(self, controller: TrajectoryController) -> None:
        super().__init__(controller.action)
        self._controller = controller

    def close(self) -> None:
        pass

    def _send(self, goal: str, trajectory: JointTrajectory) -> None:
        if self._controller.execute(goal, trajectory, lambda *result: self._end(goal, goal_failure(*result))):
            self._answer(goal)
        else:
            self._end(goal, "rejected")

    def _cancel(self, goal: str) -> None:
        self._controller.cancel(goal)
