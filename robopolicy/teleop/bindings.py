"""Keys and buttons of the keyboard and of gamepads, the same for all devices that read them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from robopolicy.teleop.contract import AXES, DISCARD, STOP, SUCCESS, TeleopCommand

KEYS = {
    "w": ("x", 1.0),
    "s": ("x", -1.0),
    "a": ("y", 1.0),
    "d": ("y", -1.0),
    "r": ("z", 1.0),
    "f": ("z", -1.0),
    "l": ("roll", 1.0),
    "j": ("roll", -1.0),
    "i": ("pitch", 1.0),
    "k": ("pitch", -1.0),
    "q": ("yaw", 1.0),
    "e": ("yaw", -1.0),
    "c": ("gripper", 1.0),
    "v": ("gripper", -1.0),
}
"""Key -> input and its value."""

# Standard layout of the Gamepad API; SDL's controllers have the same sticks.
STICKS = {"y": (0, -1.0), "x": (1, -1.0), "yaw": (2, -1.0), "z": (3, -1.0)}
"""Axis of a twist -> axis of the gamepad (left is 0 and 1, right is 2 and 3; right and down are positive), sign."""

BUTTONS = {"pitch": (12, 13), "roll": (15, 14), "gripper": (6, 7)}
"""Input -> buttons for its positive and negative value: cross up and down, right and left, the two triggers."""

ENABLE_BUTTON = 5  # right shoulder
EVENT_BUTTONS = {SUCCESS: 3, DISCARD: 1, STOP: 9}  # upper and right face button, start

SDL_BUTTONS = {0: 0, 1: 1, 2: 2, 3: 3, 4: 9, 5: 10, 8: 4, 9: 6, 12: 11, 13: 12, 14: 13, 15: 14}
"""Button of the Gamepad API -> button of SDL."""

SDL_TRIGGERS = {6: 4, 7: 5}
"""Trigger, a button of the Gamepad API -> axis of SDL."""

PRESSED = 0.5  # deflection of a trigger that counts as pressed

HELP = (
    ("hold to move", "space", "right shoulder"),
    ("forward, back, sides", "W S, A D", "left stick"),
    ("up, down", "R F", "right stick"),
    ("yaw", "Q E", "right stick"),
    ("pitch, roll", "I K, J L", "cross"),
    ("close, open gripper", "C V", "triggers"),
    ("keep as success", "Enter", "upper button"),
    ("repeat the episode", "Backspace", "right button"),
)
"""Action of the person, keys, controls of a gamepad."""


class SDLReader:
    """Translates the axes and buttons of an SDL controller to commands; an event occurs once per press."""

    def __init__(self) -> None:
        self._pressed: set[str] = set()  # events whose button is held

    def command(self, axis: Callable[[int], float], button: Callable[[int], bool], *, stamp: float) -> TeleopCommand:
        """Command of `stamp` from functions of SDL's numbers: deflections in [-1, 1], right and down positive."""

        def held(number: int) -> float:
            if number in SDL_TRIGGERS:
                return float(abs(axis(SDL_TRIGGERS[number])) > PRESSED)
            return float(button(SDL_BUTTONS[number]))

        values = {name: sign * axis(number) for name, (number, sign) in STICKS.items()}
        values |= {name: held(up) - held(down) for name, (up, down) in BUTTONS.items()}
        pressed = {event for event, number in EVENT_BUTTONS.items() if held(number)}
        events, self._pressed = pressed - self._pressed, pressed
        twist = np.array([values[name] for name in AXES])
        return TeleopCommand(bool(held(ENABLE_BUTTON)), twist, values["gripper"], None, tuple(sorted(events)), stamp)
