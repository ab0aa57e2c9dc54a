"""What a simulated robot says beside the topics of the real one: how episodes start, how they stand, and faults.

`/sim/fault` (text) makes the robot fail on purpose:

    exit              end the process at once
    freeze SECONDS    do nothing at all, like a process that is stopped
    mute SECONDS      live on and obey, but publish nothing
    nan SECONDS       report joint positions that are not numbers
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy_robots.messages import String

RESET, EPISODE, FAULT = "/sim/reset", "/sim/episode", "/sim/fault"
READY = "ready"  # line that the process prints once its topics are there
LOCKSTEP_ORIGIN = 1.0  # [s] stamp of simulated time 0 in lockstep; a stamp of 0 would mean "not given"


class _Json:
    """A flat dataclass as JSON text."""

    def message(self) -> String:
        """As it is sent."""
        return String(json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def read(cls, message: String) -> Self:
        """From a message.

        Raises:
            UserError: It is none.
        """
        try:
            data = parse_json(message.data)
            kinds = {each.name: type(each.default) for each in fields(cls)}  # type: ignore[arg-type]
            if all(type(value) is kinds.get(name) for name, value in data.items()):
                return cls(**data)
        except (AttributeError, TypeError, ValueError):
            pass
        raise UserError(f"Expected {cls.__name__} as JSON, found {message.data[:60]!r}.")


@dataclass(frozen=True)
class Reset(_Json):
    """Start an episode, on `/sim/reset`."""

    seed: int = 0
    request: int = 0  # a number of the asker's; asking again with the same one changes nothing


@dataclass(frozen=True)
class Status(_Json):
    """How the episode stands, on `/sim/episode`."""

    seed: int = 0
    request: int = -1  # of the reset that started it
    steps: int = 0  # control steps since the first command
    success: bool = False
    done: bool = False
    holding: bool = False  # the robot has heard nothing for longer than its time-out
    refused: int = 0  # commands that were none of this robot
    late: int = 0  # times that it could not keep up with real time
    time: float = 0.0  # [s] simulated since the robot was started

    def changed(self, since: Status) -> bool:
        """Whether more than time has passed."""
        return replace(self, time=since.time) != since
