"""Clients of the action `control_msgs/action/FollowJointTrajectory` of a trajectory controller.

Nothing waits for the server: its answers arrive in threads of the transport.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from typing import Any
from uuid import uuid4

from robopolicy_robots.messages import JointTrajectory

FOLLOW_JOINT_TRAJECTORY = "control_msgs/action/FollowJointTrajectory"
ACTION_TRANSPORTS = ("rclpy", "rosbridge")
ANSWER_TIMEOUT = 1.0  # [s] time within which a server must answer a goal
CANCEL_PERIOD, CANCEL_TRIES = 0.1, 5  # [s] between requests to cancel a goal, and their number
SUCCEEDED, CANCELED, ABORTED = 4, 5, 6  # of action_msgs/msg/GoalStatus
# Error codes of the result.
ERRORS = {
    -1: "invalid goal",
    -2: "invalid joints",
    -3: "old header timestamp",
    -4: "path tolerance violated",
    -5: "goal tolerance violated",
}


class TrajectoryClient(ABC):
    """Client of one action server with one goal at a time; a new goal replaces the one before."""

    action: str  # name, e.g. "/arm_controller/follow_joint_trajectory"
    # [s] Time from which a goal follows its points. Before, the controller moves straight from where it is to the first
    # point, since the delays of goals differ by less than this time.
    merge_time: float = 0.0

    @property
    @abstractmethod
    def matched(self) -> int:
        """Number of action servers, 0 or 1."""

    @property
    @abstractmethod
    def failure(self) -> str:
        """Reason for which the newest goal failed; empty while it runs, after success, and after `cancel`."""

    @abstractmethod
    def send(self, trajectory: JointTrajectory) -> None:
        """Replace the goal."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel all goals that have not ended.

        A server may miss a request that overtakes its goal, so call this repeatedly; it sends at most one request for
        each goal and `CANCEL_PERIOD`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free resources; goals are not canceled."""


class GoalTracker(TrajectoryClient):
    """Base class of clients that knows the goals that have not ended; results of replaced goals do not count."""

    def __init__(self, action: str) -> None:
        self.action = action
        self._goal = ""  # id of the newest goal; empty after its end
        self._failure = ""
        self._running: dict[str, int] = {}  # {id of a goal that has not ended: remaining requests to cancel it}
        self._unanswered = math.inf  # [s, monotonic] time of the first goal without an answer
        self._canceled = -math.inf  # [s, monotonic] time of the last request to cancel
        self._lock = threading.RLock()

    def send(self, trajectory: JointTrajectory) -> None:
        """Send a goal with a new id."""
        with self._lock:
            self._goal, self._failure, self._canceled = uuid4().hex, "", -math.inf
            self._running[self._goal] = CANCEL_TRIES
            self._unanswered = min(self._unanswered, time.monotonic())
            self._send(self._goal, trajectory)

    def cancel(self) -> None:
        """Request to cancel the goals that have not ended, at most `CANCEL_TRIES` times each."""
        with self._lock:
            self._goal, self._failure, self._unanswered = "", "", math.inf
            now = time.monotonic()
            if not self._running or now - self._canceled < CANCEL_PERIOD:
                return
            self._canceled = now
            goals = dict(self._running)
            self._running = {goal: tries - 1 for goal, tries in goals.items() if tries > 1}
            for goal in goals:
                self._cancel(goal)

    @property
    def failure(self) -> str:
        """Failure in the result of the newest goal, or a missing answer."""
        if not self._failure and time.monotonic() - self._unanswered > ANSWER_TIMEOUT:
            return f"no answer within {ANSWER_TIMEOUT:g} s"
        return self._failure

    @abstractmethod
    def _send(self, goal: str, trajectory: JointTrajectory) -> None:
        """Send a goal without waiting."""

    @abstractmethod
    def _cancel(self, goal: str) -> None:
        """Request to cancel a goal, without waiting."""

    def _answer(self, goal: str) -> None:
        """Note that the server executes a goal."""
        with self._lock:
            if goal in self._running:
                self._unanswered = math.inf

    def _end(self, goal: str, failure: str) -> None:
        """Note the end of a goal, with an empty text after success."""
        with self._lock:
            if self._running.pop(goal, None) is not None:
                self._unanswered = math.inf
            if goal == self._goal:
                self._goal, self._failure = "", failure


def goal_failure(status: Any, code: Any, text: Any) -> str:
    """Describe the failure in a result of status, error code and error text; empty after success."""
    if type(status) is not int or type(code) is not int or status not in (SUCCEEDED, CANCELED, ABORTED):
        return f"malformed result with status {status!r} and error code {code!r}"
    if status == SUCCEEDED and code == 0:
        return ""
    outcome = {SUCCEEDED: "failed", CANCELED: "canceled by the server", ABORTED: "aborted"}[status]
    details = [ERRORS.get(code, f"error {code}") if code else "", " ".join(str(text).split())[:200]]
    return ": ".join([outcome, *filter(None, details)])
