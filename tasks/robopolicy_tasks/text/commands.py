"""Command language of text policies for a robot, parsed by a regular expression and never executed as code.

    program = command { ";" command }
    command = "grasp" | "lift" | "release" | "carry" place
    place   = ("pad" | "start") [ ("left" | "right" | "forward" | "back") centimetres ]

Directions are relative to the robot: forward is x, left is y.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from robopolicy.sim.backends.mujoco.task import Array

VERBS = ("grasp", "lift", "carry", "release")
DIRECTIONS = {"left": (0.0, 1.0), "right": (0.0, -1.0), "forward": (1.0, 0.0), "back": (-1.0, 0.0)}
MAX_COMMANDS = 6
FORM = re.compile(r"(grasp|lift|release)|carry (pad|start)(?: (left|right|forward|back) (\d{1,2}))?")

COMMAND = r"(?:" + FORM.pattern + r")"
PROGRAM = rf"{COMMAND}(?:;{COMMAND}){{0,{MAX_COMMANDS - 1}}}"
"""The forms of a command and of a program, as regular expressions."""


class ProgramError(ValueError):
    """Invalid program."""


@dataclass(frozen=True)
class Place:
    """Position on the table relative to the pad or to the initial position of the cube."""

    anchor: str  # pad | start
    direction: str = "left"
    centimetres: int = 0

    def __str__(self) -> str:
        return f"{self.anchor} {self.direction} {self.centimetres}" if self.centimetres else self.anchor

    @property
    def offset(self) -> Array:
        """Offset (2,) [m] from the anchor."""
        return 0.01 * self.centimetres * np.array(DIRECTIONS[self.direction])


@dataclass(frozen=True)
class RobotCommand:
    """One step of a program."""

    verb: str  # one of VERBS
    place: Place | None = None  # of "carry"

    def __str__(self) -> str:
        return self.verb if self.place is None else f"{self.verb} {self.place}"


def parse(program: str, limit: int = MAX_COMMANDS) -> list[RobotCommand]:
    """Parse the commands of a program.

    Raises:
        ProgramError: The program is invalid or has more than `limit` commands.
    """
    commands = [part.strip() for part in program.split(";")]
    if len(commands) > limit:
        raise ProgramError(f"{len(commands)} commands, at most {limit}")
    return [_command(text) for text in commands]


def _command(text: str) -> RobotCommand:
    match = FORM.fullmatch(text)
    if match is None:
        raise ProgramError(f"'{text}' is not a command")
    verb, anchor, direction, number = match.groups()
    if verb:
        return RobotCommand(verb)
    return RobotCommand("carry", Place(anchor, direction, int(number)) if direction else Place(anchor))
