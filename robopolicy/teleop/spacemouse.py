"""SpaceMouse through pyspacemouse: its cap springs back, so that a deflected cap is the dead-man switch.

The device keeps its last axes without reports, for instance after it is disconnected, so a command has the time of the
newest report and becomes old without one.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.teleop.contract import AXES, DEAD_ZONE, Teleop, TeleopCommand
from robopolicy.teleop.terminal import TerminalTeleop

MAX_REPORTS = 64  # read per command, about half a second of motion


class SpaceMouseTeleop(Teleop):
    """Cap moves, left button closes and right button opens the gripper; events come from the keys of the terminal.

    Args:
        device: Device of pyspacemouse with the axes of ROS (x forward, y left, z up).
        keys: Terminal for events; None without one.
    """

    module = "pyspacemouse"
    extra = "spacemouse"
    springs_back: ClassVar[bool] = True

    def __init__(self, device: Any, keys: TerminalTeleop | None = None) -> None:
        self._device, self._keys = device, keys
        self._report = float("nan")  # time of the newest report on the device's clock
        self._stamp = -np.inf

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Open the first SpaceMouse, or the one with the name `argument`; needs the system library hidapi."""
        pyspacemouse = require("pyspacemouse", cls.extra)
        try:
            device = pyspacemouse.open(device=argument or None, axis_convention=pyspacemouse.AxisConvention.ROS)
        except Exception as error:  # of hidapi, of its absence, and of missing permissions
            reason = " ".join(str(error).split()).rstrip(".")
            text = "install libhidapi and allow access by a udev rule (see docs/guide/teleoperate.md)"
            raise UserError(f"No SpaceMouse can be opened ({reason}); {text}.") from error
        return cls(device, TerminalTeleop.if_available())

    def read(self, now: float) -> TeleopCommand:
        """Return the axes of the newest report."""
        for _ in range(MAX_REPORTS):
            state = self._device.read()
            if state.t == self._report or state.t < 0:  # no further report
                break
            self._report, self._stamp = state.t, now
        state = self._device.read()
        twist = np.array([getattr(state, axis) for axis in AXES], np.float64)
        left, right = (*map(bool, state.buttons), False, False)[:2]
        enabled = bool((np.abs(twist) > DEAD_ZONE).any()) or left or right
        events = self._keys.read(now).events if self._keys else ()
        return TeleopCommand(enabled, twist, float(left) - float(right), None, events, self._stamp)

    def close(self) -> None:
        """Close the device and restore the terminal."""
        self._device.close()
        if self._keys:
            self._keys.close()
