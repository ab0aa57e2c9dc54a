"""Input devices by name, imported on first use. Importing this module imports neither torch nor any device."""

from __future__ import annotations

from robopolicy.errors import unknown_name
from robopolicy.plugins import Registry
from robopolicy.teleop.contract import Teleop

DEVICES: Registry[type[Teleop]] = Registry(
    "teleops",
    {
        "browser": "robopolicy.teleop.browser:BrowserTeleop",
        "gamepad": "robopolicy.teleop.gamepad:GamepadTeleop",
        "lerobot": "robopolicy.teleop.lerobot:LeRobotTeleop",
        "spacemouse": "robopolicy.teleop.spacemouse:SpaceMouseTeleop",
        "terminal": "robopolicy.teleop.terminal:TerminalTeleop",
    },
)
"""Name -> class; packages add theirs by the entry-point group `robopolicy.teleops`."""


def open_device(text: str) -> Teleop:
    """Open a device `NAME` or `NAME:ARGUMENT`, e.g. `gamepad` or `browser:8790`.

    Raises:
        UserError: The name is unknown, or the device cannot be opened.
    """
    name, _, argument = text.partition(":")
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return DEVICES[name].open(argument)
