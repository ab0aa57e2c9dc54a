"""Gamepad without hardware: the virtual joystick of the SDL that pygame ships, for scripted persons and tests."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

from robopolicy.teleop.bindings import BUTTONS, ENABLE_BUTTON, EVENT_BUTTONS, SDL_BUTTONS, SDL_TRIGGERS, STICKS
from robopolicy.teleop.contract import AXES, Array, deflection
from robopolicy.teleop.gamepad import FULL

os.environ |= {"SDL_VIDEODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
GAME_CONTROLLER = 1  # type of a joystick whose buttons and axes SDL maps to its standard layout
NUM_AXES, NUM_BUTTONS, NUM_HATS = 6, 15, 1


class VirtualGamepad:
    """Connected gamepad; `twist` and `press` move its sticks and buttons."""

    def __init__(self) -> None:
        import pygame

        pygame.display.init()
        pygame.joystick.init()
        libraries = Path(pygame.__file__).parent.parent / "pygame.libs"
        self._sdl = ctypes.CDLL(str(next(libraries.glob("libSDL2-2*"))))
        self._sdl.SDL_JoystickFromInstanceID.restype = ctypes.c_void_p
        self.index = self._sdl.SDL_JoystickAttachVirtual(GAME_CONTROLLER, NUM_AXES, NUM_BUTTONS, NUM_HATS)
        assert self.index >= 0
        self._joystick = pygame.joystick.Joystick(self.index)
        self._handle = ctypes.c_void_p(self._sdl.SDL_JoystickFromInstanceID(self._joystick.get_instance_id()))

    def twist(self, speed: Array) -> None:
        """Deflect sticks and cross for a speed `(6,)` in [-1, 1]; the cross knows only its sign."""
        values: dict[str, float] = dict(zip(AXES, deflection(np.clip(speed, -1.0, 1.0)), strict=True))
        for axis, (number, sign) in STICKS.items():
            self._axis(number, sign * values[axis])
        for name in ("pitch", "roll"):
            self._pair(name, values[name])

    def gripper(self, value: float) -> None:
        """Press the trigger that closes (1) or opens (-1) the gripper, or neither (0)."""
        self._pair("gripper", value)

    def enable(self, held: bool) -> None:
        """Hold the dead-man switch or let go."""
        self._button(ENABLE_BUTTON, held)

    def press(self, event: str, held: bool = True) -> None:
        """Press the button of an event or let go."""
        self._button(EVENT_BUTTONS[event], held)

    def unplug(self) -> None:
        """Disconnect the gamepad."""
        self._sdl.SDL_JoystickDetachVirtual(self.index)

    def _pair(self, name: str, value: float) -> None:
        for button, held in zip(BUTTONS[name], (value > 0, value < 0), strict=True):
            self._button(button, held)

    def _button(self, number: int, held: bool) -> None:
        if number in SDL_TRIGGERS:
            self._axis(SDL_TRIGGERS[number], 1.0 if held else -1.0)
        else:
            self._sdl.SDL_JoystickSetVirtualButton(self._handle, SDL_BUTTONS[number], ctypes.c_uint8(bool(held)))

    def _axis(self, number: int, value: float) -> None:
        self._sdl.SDL_JoystickSetVirtualAxis(self._handle, number, ctypes.c_int16(round(value * FULL)))
