"""Teleoperators of LeRobot: leader arms, which give joint positions, and devices that give changes of the tool pose.

A leader arm has no dead-man switch, so the space key of the terminal is one: the robot follows while it is held.
Devices with events report whether the person intervenes, and end episodes: with success, or to repeat them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from robopolicy.errors import UserError, unknown_name
from robopolicy.interop.lerobot.choices import config_choices
from robopolicy.optional import require
from robopolicy.teleop.contract import AXES, DISCARD, SUCCESS, Teleop, TeleopCommand
from robopolicy.teleop.terminal import TerminalTeleop

GRIPPER_COMMANDS = {0: 1.0, 1: 0.0, 2: -1.0}  # close, stay, open
USE_DEGREES = "use_degrees"  # setting of LeRobot's leader arms
PERCENT = "RANGE_M100_100"  # norm_mode of motors in LeRobot with positions from -100 to 100
_EVENTS = {"success": SUCCESS, "rerecord_episode": DISCARD, "terminate_episode": DISCARD}  # the first that is set


class LeRobotTeleop(Teleop):
    """Teleoperator of LeRobot, e.g. `lerobot:so101_leader:/dev/ttyACM0` (type, then port).

    Args:
        device: Connected teleoperator.
        keys: Terminal whose space key is the dead-man switch of a device without events; None without a terminal.
    """

    module = "lerobot"
    extra = "lerobot"
    springs_back: ClassVar[bool] = True  # joints move relative to the pose at enabling

    def __init__(self, device: Any, keys: TerminalTeleop | None = None) -> None:
        self._device, self._keys = device, keys
        self._has_events = hasattr(device, "get_teleop_events")
        if not self._has_events and keys is None:
            raise UserError("A leader arm needs a terminal, whose space key is the dead-man switch; run it in one.")

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Connect the teleoperator of a type and port, `TYPE[:PORT]`."""
        kind, _, port = argument.partition(":")
        teleoperators = require("lerobot.teleoperators", cls.extra)
        try:
            known = config_choices(teleoperators.TeleoperatorConfig, "lerobot.teleoperators", kind)
            if kind not in known:
                raise unknown_name("teleoperator of LeRobot", kind, known)
            config = known[kind]
            settings: dict[str, Any] = {"port": port} if port else {}
            if hasattr(config, USE_DEGREES):
                settings[USE_DEGREES] = True
            device = teleoperators.make_teleoperator_from_config(config(**settings))
            _check_units(kind, device)
            device.connect()
        except UserError:
            raise
        except Exception as error:  # of serial ports, calibration and missing drivers
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise UserError(
                f"LeRobot cannot connect '{argument}' ({reason}); pass e.g. lerobot:so101_leader:/dev/ttyACM0."
            ) from error
        return cls(device, TerminalTeleop.if_available())

    def read(self, now: float) -> TeleopCommand:
        """Return the joints of a leader arm [rad, grippers as a fraction], or changes of the tool pose as a twist."""
        action: Mapping[str, Any] = self._device.get_action()
        reported = self._device.get_teleop_events() if self._has_events else {}
        events = {_name(key) for key, value in reported.items() if value}
        keys = self._keys.read(now) if self._keys else TeleopCommand()
        names = tuple(event for name, event in _EVENTS.items() if name in events)[:1]
        enabled = "is_intervention" in events or keys.enabled
        joints = {key.removesuffix(".pos"): float(value) for key, value in action.items() if key.endswith(".pos")}
        if joints:
            joints = {n: value / 100 if "gripper" in n else math.radians(value) for n, value in joints.items()}
            return TeleopCommand(enabled, joints=joints, events=(*names, *keys.events), stamp=now)
        twist = np.array([float(action.get(f"delta_{axis}", 0.0)) for axis in AXES])
        gripper = GRIPPER_COMMANDS.get(int(action.get("gripper", 1)), 0.0)
        return TeleopCommand(enabled, twist, gripper, None, (*names, *keys.events), now)

    def close(self) -> None:
        """Disconnect the device and restore the terminal."""
        self._device.disconnect()
        if self._keys:
            self._keys.close()


def _check_units(kind: str, device: Any) -> None:
    """Raise `UserError` for an arm whose joints are fractions of a calibrated range instead of angles."""
    motors: Mapping[str, Any] = getattr(getattr(device, "bus", None), "motors", {})
    if any(getattr(motor.norm_mode, "name", "") == PERCENT for motor in motors.values()):
        raise UserError(f"'{kind}' gives joints from -100 to 100 and cannot give degrees; use an arm that does.")


def _name(event: Any) -> str:
    """Name of an event, a text or a member of LeRobot's `TeleopEvents`."""
    return str(getattr(event, "value", event))
