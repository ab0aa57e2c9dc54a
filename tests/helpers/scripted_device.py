"""Input device of tests: a list of commands, and a clock that does not wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from robopolicy.teleop.contract import SessionStatus, Teleop, TeleopCommand
from robopolicy.teleop.session import Clock


class FakeClock(Clock):
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, until: float) -> None:
        self.time = max(self.time, until)


class ScriptedTeleop(Teleop):
    """Device whose commands follow from the number of the call; `shown` collects what it shows."""

    def __init__(self, command: Callable[[int], TeleopCommand]) -> None:
        self._command, self._calls = command, 0
        self.shown: list[tuple[SessionStatus, Mapping[str, Any]]] = []
        self.closed = False

    @classmethod
    def open(cls, argument: str = "") -> Self:
        raise NotImplementedError

    def read(self, now: float) -> TeleopCommand:
        self._calls += 1
        return replace(self._command(self._calls - 1), stamp=now)

    def show(self, status: SessionStatus, images: Mapping[str, Any]) -> None:
        self.shown.append((status, images))

    def close(self) -> None:
        self.closed = True
