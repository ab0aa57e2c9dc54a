"""Contract of input devices: the newest command of a person, read without waiting.

A command moves something only while `enabled` is held (dead-man switch). `DeadManSwitch` applies the rules that hold
for every device: a command that is old, from the future or not finite lets go, and motion starts only after the axes
have been neutral, so that holding the switch never causes a jump.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
AXES = ("x", "y", "z", "roll", "pitch", "yaw")
"""Axes of a twist: forward, left, up, and the rotations about them."""

SUCCESS, DISCARD, STOP = "success", "discard", "stop"
EVENTS = (SUCCESS, DISCARD, STOP)
"""Keep the episode as successful, repeat the episode without keeping it, end the session."""

MAX_AGE = 0.15  # [s] age at which a command lets go; three lost messages at 20 Hz
IMAGE_PERIOD = 0.1  # [s] between images that a device shows
DEAD_ZONE = 0.1  # deflection of an axis that counts as neutral


def _zeros() -> Array:
    return np.zeros(len(AXES))


@dataclass(frozen=True, eq=False)
class TeleopCommand:
    """State of an input device."""

    enabled: bool = False  # whether the dead-man switch is held
    twist: Array = field(default_factory=_zeros)  # (6,) deflections in [-1, 1] along `AXES`
    gripper: float = 0.0  # 1 closes, -1 opens, 0 keeps
    joints: Mapping[str, float] | None = None  # positions of a leader arm by joint, in place of the twist
    events: tuple[str, ...] = ()  # events since the last command, from `EVENTS`
    stamp: float = -np.inf  # [s, monotonic] time of the newest input


@dataclass(frozen=True)
class SessionStatus:
    """What a session shows to the person."""

    title: str
    actor: str = ""  # who acts: you | policy | paused
    rows: tuple[tuple[str, str], ...] = ()  # named values, e.g. ("episode", "3 of 10")


class Teleop(ABC):
    """Input device."""

    module: ClassVar[str] = ""  # package that it needs
    extra: ClassVar[str] = ""  # extra of robopolicy that installs it
    install: ClassVar[str] = ""  # how to install it where no extra does
    springs_back: ClassVar[bool] = False  # the motion itself is the dead-man switch, so it starts from any deflection
    shows_images: ClassVar[bool] = False  # whether `show` displays images

    @classmethod
    @abstractmethod
    def open(cls, argument: str = "") -> Self:
        """Open the device; `argument` is the text after the colon of `NAME:ARGUMENT`.

        Raises:
            UserError: The device or its package is missing, or the argument is invalid.
        """

    @abstractmethod
    def read(self, now: float) -> TeleopCommand:
        """Return the newest command at `now` [s, monotonic], without waiting."""

    def show(self, status: SessionStatus, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Show the status and images `{camera: (h, w, 3)}` to the person, where the device has a display."""

    def close(self) -> None:
        """Release the device; safe to call twice."""


class DeadManSwitch:
    """Rules under which a command moves something.

    Args:
        springs_back: See `Teleop.springs_back`.
        max_age: Age of a command [s] at which it lets go.
    """

    def __init__(self, *, springs_back: bool = False, max_age: float = MAX_AGE) -> None:
        self.rejected = 0  # commands that were not finite or from the future
        self.clipped = 0  # commands with an axis outside [-1, 1]
        self._springs_back, self._max_age = springs_back, max_age
        self._ready = False  # the axes have been neutral since the switch is held

    def check(self, command: TeleopCommand, now: float) -> TeleopCommand:
        """Return the command with `enabled` by the rules, and axes in [-1, 1]; zero axes if it is not enabled."""
        numbers = [*command.twist, command.gripper, *(command.joints or {}).values()]
        sound = np.shape(command.twist) == (len(AXES),) and bool(np.isfinite(numbers).all())
        current = 0.0 <= now - command.stamp <= self._max_age
        self.rejected += not sound or command.stamp > now
        if not (command.enabled and sound and current):
            self._ready = False
            return replace(command, enabled=False, twist=_zeros(), gripper=0.0, joints=None)
        twist = np.clip(command.twist, -1.0, 1.0)
        self.clipped += bool((twist != command.twist).any())
        self._ready |= self._springs_back or bool((np.abs(twist) <= DEAD_ZONE).all())
        if not self._ready:
            return replace(command, enabled=False, twist=_zeros(), gripper=0.0, joints=None)
        return replace(command, twist=twist, gripper=float(np.clip(command.gripper, -1.0, 1.0)))


def shape(deflection: Array) -> Array:
    """Speeds in [-1, 1] of deflections: zero in the dead zone, cubic outside of it."""
    beyond = np.maximum(np.abs(deflection) - DEAD_ZONE, 0.0) / (1.0 - DEAD_ZONE)
    return np.copysign(beyond**3, deflection)


def deflection(speed: Array) -> Array:
    """Inverse of `shape`: deflections of speeds in [-1, 1]."""
    beyond = np.cbrt(np.abs(speed))
    return np.where(speed == 0, 0.0, np.copysign(DEAD_ZONE + (1.0 - DEAD_ZONE) * beyond, speed))


def read_numbers(values: Any, count: int) -> Array | None:
    """Return the first `count` numbers of a sequence, or None if there are fewer or other types."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < count:
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values[:count]):
        return None
    return np.array(values[:count], np.float64)
