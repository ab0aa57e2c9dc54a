"""Additional topics of a simulated robot: reset, episode status and faults.

`/sim/fault` (text) injects a fault:

    exit              end the process immediately
    freeze SECONDS    do nothing, like a stopped process
    mute SECONDS      execute commands, but publish nothing
    nan SECONDS       publish NaN as joint positions
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy_robots.messages import String

RESET, EPISODE, FAULT = "/sim/reset", "/sim/episode", "/sim/fault"
READY = "ready"  # line printed by the process once its topics exist
LOCKSTEP_ORIGIN = 1.0  # [s] stamp of simulated time 0 in lockstep; a stamp of 0 means "not given"


class _Json:
    """Base class of flat dataclasses sent as JSON text."""

    def message(self) -> String:
        """Convert to a message."""
        return String(json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def read(cls, message: String) -> Self:
        """Parse a message; raises `UserError` if it is invalid."""
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
    """Request to start an episode, on `/sim/reset`."""

    seed: int = 0
    request: int = 0  # number of the request; a repeated number has no effect


@dataclass(frozen=True)
class Status(_Json):
    """Status of the episode, on `/sim/episode`."""

    seed: int = 0
    request: int = -1  # number of the reset request that started it
    steps: int = 0  # control steps since the first command
    success: bool = False
    done: bool = False
    holding: bool = False  # no command for longer than the timeout
    refused: int = 0  # number of invalid requests and commands
    late: int = 0  # number of delays behind real time
    time: float = 0.0  # [s] simulated time since the start of the robot

    def changed(self, since: Status) -> bool:
        """Whether anything except the time differs from `since`."""
        return replace(self, time=since.time) != since
