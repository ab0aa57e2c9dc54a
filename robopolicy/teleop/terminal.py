"""Keyboard of a terminal, which reports no releases: a key is held while it repeats.

The first press holds for `FIRST` seconds, which bridges the delay before a terminal repeats a key; each repetition
holds for `REPEAT` seconds. A held key is the dead-man switch, since a terminal repeats only the key pressed last.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.teleop.bindings import KEYS
from robopolicy.teleop.contract import AXES, DISCARD, STOP, SUCCESS, SessionStatus, Teleop, TeleopCommand

FIRST, REPEAT = 0.6, 0.12  # [s] how long a first press and a repetition hold
EVENT_KEYS = {"\n": SUCCESS, "\r": SUCCESS, "\x7f": DISCARD, "\b": DISCARD, "\x04": STOP}  # enter, backspace, ctrl-d
READ_BYTES = 256


class TerminalTeleop(Teleop):
    """Keys of this terminal: W A S D, R F and so on; space holds still, enter keeps, backspace repeats, ctrl-d ends."""

    springs_back: ClassVar[bool] = True

    def __init__(self, file: int) -> None:
        self._file = file
        self._held: dict[str, float] = {}  # key -> time until which it is held
        self._line = ""
        self._before = termios.tcgetattr(file)
        tty.setcbreak(file)

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Open the terminal of the process."""
        if argument or not sys.stdin.isatty():
            raise UserError("The device 'terminal' reads this terminal; run it in one, without an argument.")
        return cls(sys.stdin.fileno())

    @classmethod
    def if_available(cls) -> Self | None:
        """Open the terminal of the process, if it has one."""
        return cls.open() if sys.stdin.isatty() else None

    def read(self, now: float) -> TeleopCommand:
        """Return the keys that are held at `now`, and the events since the last call."""
        events: list[str] = []
        while select.select([self._file], [], [], 0)[0] and (data := os.read(self._file, READ_BYTES)):
            for key in data.decode(errors="ignore"):
                if key in EVENT_KEYS:
                    events.append(EVENT_KEYS[key])
                elif key.lower() in KEYS or key == " ":
                    again = self._held.get(key.lower(), -np.inf) > now
                    self._held[key.lower()] = now + (REPEAT if again else FIRST)
        self._held = {key: until for key, until in self._held.items() if until > now}
        values: dict[str, float] = dict.fromkeys((*AXES, "gripper"), 0.0)
        for name, value in (KEYS[key] for key in self._held if key in KEYS):
            values[name] += value
        twist = np.array([values[axis] for axis in AXES])
        return TeleopCommand(bool(self._held), twist, values["gripper"], None, tuple(events), now)

    def show(self, status: SessionStatus, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Print the status in one line, which the next one replaces."""
        line = ", ".join((status.title, status.actor, *(f"{name} {value}" for name, value in status.rows)))
        if line != self._line:
            self._line = line
            sys.stdout.write(f"\r\x1b[K{line}")
            sys.stdout.flush()

    def close(self) -> None:
        """Restore the terminal."""
        if self._line:
            sys.stdout.write("\n")
        self._line = ""
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
