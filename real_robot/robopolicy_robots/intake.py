"""What the control loop hears: the newest message of every source, how old it is, and from whom."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from robopolicy.deploy.safety.filter import Measured
from robopolicy.deploy.safety.motion import Array
from robopolicy.deploy.safety.watchdog import Watchdog
from robopolicy.errors import UserError
from robopolicy_robots.messages import CATALOGUE, JointState
from robopolicy_robots.robot import JOINTS, QUALITIES, RobotSpec
from robopolicy_robots.transports.base import Received, Subscription, Transport


class Intake:
    """Subscriptions to everything that the embodiment reads, and to the joints in any case.

    A source is bound to the publisher that is heard when the robot is armed; another one is a fault, even if it says
    the same (a process left over from before would otherwise keep the watchdog content).
    """

    def __init__(self, robot: RobotSpec, transport: Transport, keys: Iterable[str]) -> None:
        topics = {key: robot.source(key) for key in dict.fromkeys((JOINTS, *keys))}
        self.state: dict[str, Received] = {}  # newest message in order, by source
        self.watchdog = Watchdog({key: robot.deadline(key) for key in topics})
        self._names = robot.names
        self._topics = topics
        self._bound: dict[str, str] = {}
        self.subscriptions: dict[str, Subscription] = {
            key: transport.subscribe(topic.topic, CATALOGUE[topic.kind], QUALITIES[topic.qos])
            for key, topic in topics.items()
        }

    def drain(self) -> None:
        """Take what has arrived."""
        for key, subscription in self.subscriptions.items():
            received = subscription.latest()
            if received is None:
                continue
            if self.watchdog.see(key, received.received, received.stamp, received.sequence):
                self.state[key] = received

    def bind(self) -> None:
        """From now on each source has to come from whom it comes now."""
        self._bound = {key: received.publisher for key, received in self.state.items()}

    def unbind(self) -> None:
        """Take messages from anyone, and forget how old is usual."""
        self._bound = {}
        self.state = {}
        self.watchdog.forget()

    def stranger(self) -> str:
        """What is wrong with who publishes; empty if every source has one publisher, the one bound."""
        for key, subscription in self.subscriptions.items():
            count = subscription.publishers
            if count != 1:
                return f"{count} publishers of {self._topics[key].topic}"
            if key in self._bound and key in self.state and self.state[key].publisher != self._bound[key]:
                return f"another publisher of {self._topics[key].topic}"
        return ""

    def stale(self, now: float) -> str:
        """What has not been heard of lately; empty if everything has."""
        late = self.watchdog.oldest(now)
        return f"no fresh '{late[0]}'" if late else ""

    def ages(self, now: float) -> dict[str, float | None]:
        """Age of every source [s]; None before its first message."""
        ages = {key: stream.age(now) for key, stream in self.watchdog.streams.items()}
        return {key: round(age, 4) if np.isfinite(age) else None for key, age in ages.items()}

    def measured(self, now: float) -> Measured:
        """The robot's joints in our order, whatever order they come in.

        Raises:
            UserError: A joint is missing, or its position is not a finite number.
        """
        if JOINTS not in self.state:
            raise UserError("no joint state yet")
        message = self.state[JOINTS].message
        assert isinstance(message, JointState)
        place = {name: i for i, name in enumerate(message.name)}
        missing = [name for name in self._names if name not in place]
        if missing:
            raise UserError(f"the joint state lacks {', '.join(missing)}")
        order = [place[name] for name in self._names]

        def column(values: Array) -> Array:
            return values[order] if len(values) == len(message.name) else np.full(len(order), np.nan)

        position = column(message.position)
        if not np.isfinite(position).all():
            raise UserError(f"the position of {self._names[int(np.argmin(np.isfinite(position)))]} is not finite")
        return Measured(now, position, column(message.velocity), column(message.effort))
