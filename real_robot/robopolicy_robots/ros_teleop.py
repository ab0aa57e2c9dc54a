"""Input devices on ROS topics: a gamepad as `sensor_msgs/Joy`, and speeds as `geometry_msgs/Twist`."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np

from robopolicy.errors import UserError
from robopolicy.teleop.bindings import SDL_BUTTONS, SDL_TRIGGERS, SDLReader
from robopolicy.teleop.contract import DEAD_ZONE, Teleop, TeleopCommand
from robopolicy_robots.messages import Joy, Twist
from robopolicy_robots.transports.base import AUTO, SENSOR, Transport, open_transport

NUM_AXES, NUM_BUTTONS = 1 + max(SDL_TRIGGERS.values()), 1 + max(SDL_BUTTONS.values())


def _open(argument: str) -> tuple[Transport, str]:
    """Transport and topic of `[TRANSPORT:]/TOPIC`."""
    transport, colon, topic = argument.rpartition(":")
    if not topic.startswith("/"):
        raise UserError(f"A device of ROS has a topic, such as joy:/joy or joy:dds:/joy, got '{argument}'.")
    return open_transport(transport if colon else AUTO), topic


class JoyTeleop(Teleop):
    """Topic of `sensor_msgs/Joy`, `joy:[TRANSPORT:]/TOPIC`, of the node `game_controller_node` of the package `joy`.

    It has the numbers of SDL for every known gamepad, with left and forward positive. The numbers of `joy_node` differ
    between gamepads.
    """

    module = "rosbags"
    extra = "ros"

    def __init__(self, transport: Transport, topic: str) -> None:
        self._transport = transport
        self._joy = transport.subscribe(topic, Joy, SENSOR)
        self._reader = SDLReader()
        self.malformed = 0  # messages with too few axes or buttons

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Subscribe to the topic."""
        return cls(*_open(argument))

    def read(self, now: float) -> TeleopCommand:
        """Return the newest message, with the time of its arrival, at most `now`."""
        if (received := self._joy.latest()) is None:
            return TeleopCommand()
        joy = received.message
        if len(joy.axes) < NUM_AXES or len(joy.buttons) < NUM_BUTTONS:
            self.malformed += 1
            return TeleopCommand()
        axis = lambda number: -float(joy.axes[number])  # noqa: E731 - right and down become positive
        return self._reader.command(axis, lambda number: joy.buttons[number] > 0, stamp=min(received.received, now))

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()


class TwistTeleop(Teleop):
    """Topic of `geometry_msgs/Twist`, `twist:[TRANSPORT:]/TOPIC`, as fractions of full speed; zero lets go."""

    module = "rosbags"
    extra = "ros"
    springs_back: ClassVar[bool] = True

    def __init__(self, transport: Transport, topic: str) -> None:
        self._transport = transport
        self._twist = transport.subscribe(topic, Twist, SENSOR)

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Subscribe to the topic."""
        return cls(*_open(argument))

    def read(self, now: float) -> TeleopCommand:
        """Return the newest message, with the time of its arrival, at most `now`."""
        if (received := self._twist.latest()) is None:
            return TeleopCommand()
        parts = received.message.linear, received.message.angular
        twist = np.array([getattr(part, axis) for part in parts for axis in "xyz"])
        return TeleopCommand(bool((np.abs(twist) > DEAD_ZONE).any()), twist, stamp=min(received.received, now))

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()
