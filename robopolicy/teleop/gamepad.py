"""Gamepad through SDL (pygame), with the standard layout that SDL knows for most gamepads."""

from __future__ import annotations

import os
from typing import Any, Self

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.teleop.bindings import SDLReader
from robopolicy.teleop.contract import Teleop, TeleopCommand

FULL = 32767  # value of a fully deflected axis


class GamepadTeleop(Teleop):
    """First connected gamepad, or gamepad number ARGUMENT: hold the right shoulder button to move."""

    module = "pygame"
    extra = "gamepad"

    def __init__(self, index: int = 0) -> None:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # events without a window
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        self._pygame = require("pygame", self.extra)
        controllers = require("pygame._sdl2.controller", self.extra)
        self._pygame.display.init()
        controllers.init()
        if not (0 <= index < controllers.get_count() and controllers.is_controller(index)):
            found = controllers.get_count()
            raise UserError(f"There is no gamepad {index} ({found} connected); connect one, or use --device browser.")
        self._pad: Any = controllers.Controller(index)
        self._reader = SDLReader()

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Open gamepad number `argument`, by default 0."""
        if argument and not argument.isdecimal():
            raise UserError(f"A gamepad has a number, such as gamepad:1, got '{argument}'.")
        return cls(int(argument or 0))

    def read(self, now: float) -> TeleopCommand:
        """Return the current state; a disconnected gamepad lets go."""
        self._pygame.event.pump()
        self._pygame.event.clear()
        if not self._pad.attached():
            return TeleopCommand(stamp=now)
        axis = lambda number: max(-1.0, self._pad.get_axis(number) / FULL)  # noqa: E731
        return self._reader.command(axis, self._pad.get_button, stamp=now)

    def close(self) -> None:
        """Release the gamepad; SDL remains initialised for other devices of the process."""
        self._pad.quit()
