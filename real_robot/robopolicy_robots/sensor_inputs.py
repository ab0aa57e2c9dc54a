"""Inputs of the control loop: newest messages of all sources, with ages and publishers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from robopolicy.deploy.safety.filter import JointMeasurement
from robopolicy.deploy.safety.motion import Array
from robopolicy.deploy.safety.watchdog import Watchdog
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy_robots.messages import CATALOGUE, JointState
from robopolicy_robots.robot import JOINTS, QOS_PROFILES, RobotSpec
from robopolicy_robots.transports.base import Received, Subscription, Transport


class SensorInputs:
    """Subscriptions to the sources of the embodiment and to the joint state.

    A source is locked to its publisher when the robot is armed. Another publisher is a fault even with the same
    messages, since messages of an old process would otherwise satisfy the watchdog.
    """

    def __init__(self, robot: RobotSpec, transport: Transport, keys: Iterable[str]) -> None:
        topics = {key: robot.source(key) for key in dict.fromkeys((JOINTS, *keys))}
        self.state: dict[str, Received] = {}  # newest message in order, by source
        self.watchdog = Watchdog({key: robot.deadline(key) for key in topics})
        self._names = robot.names
        self._topics = topics
        self._locked: dict[str, str] = {}
        self.subscriptions: dict[str, Subscription] = {
            key: transport.subscribe(topic.topic, CATALOGUE[topic.type], QOS_PROFILES[topic.qos])
            for key, topic in topics.items()
        }

    def poll(self) -> None:
        """Read all messages that have arrived."""
        for key, subscription in self.subscriptions.items():
            received = subscription.latest()
            if received is None:
                continue
            if self.watchdog.update(key, received.received, received.stamp, received.sequence):
                self.state[key] = received

    def lock_publishers(self) -> None:
        """Lock each source to its current publisher."""
        self._locked = {key: received.publisher for key, received in self.state.items()}

    def unlock_publishers(self) -> None:
        """Accept any publisher and reset the watchdog."""
        self._locked = {}
        self.state = {}
        self.watchdog.reset()

    def publisher_error(self) -> str:
        """Error text about publishers; empty if every source has only its locked publisher."""
        for key, subscription in self.subscriptions.items():
            count = subscription.publishers
            if count != 1:
                return f"{counted(count, 'publisher')} of {self._topics[key].topic}"
            if key in self._locked and key in self.state and self.state[key].publisher != self._locked[key]:
                return f"another publisher of {self._topics[key].topic}"
        return ""

    def stale_source(self, now: float) -> str:
        """Error text about the stalest source; empty if all are fresh."""
        late = self.watchdog.oldest(now)
        return f"no fresh '{late[0]}'" if late else ""

    def ages(self, now: float) -> dict[str, float | None]:
        """Age of every source [s]; None before its first message."""
        ages = {key: stream.age(now) for key, stream in self.watchdog.streams.items()}
        return {key: round(age, 4) if np.isfinite(age) else None for key, age in ages.items()}

    def measured(self, now: float) -> JointMeasurement:
        """Measured joints in the robot's order; raises `UserError` if a joint is missing or not finite."""
        if JOINTS not in self.state:
            raise UserError("no joint state yet")
        message = self.state[JOINTS].message
        assert isinstance(message, JointState)
        index = {name: i for i, name in enumerate(message.name)}
        missing = [name for name in self._names if name not in index]
        if missing:
            raise UserError(f"the joint state lacks {', '.join(missing)}")
        order = [index[name] for name in self._names]

        def column(values: Array) -> Array:
            return values[order] if len(values) == len(message.name) else np.full(len(order), np.nan)

        position = column(message.position)
        if not np.isfinite(position).all():
            raise UserError(f"the position of {self._names[int(np.argmin(np.isfinite(position)))]} is not finite")
        return JointMeasurement(now, position, column(message.velocity), column(message.effort))
