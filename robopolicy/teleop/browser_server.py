"""Server process of the teleoperation page: one operator, whose inputs it forwards with the time of their arrival.

    python -m robopolicy.teleop.browser_server HOST PORT DESCRIPTOR PAGE COMMAND...

A second client is refused. Inputs are JSON objects `{"input": {...}}`; more than `MAX_RATE` per second, or longer than
`max_message`, disconnect the client.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import Any, ClassVar

from robopolicy.deploy.dashboard_server import DashboardServer, main

INPUT = b"\0"  # first byte of an input; then its time [s, monotonic] as a double, and its JSON text
MAX_RATE = 200  # messages per second


class OperatorServer(DashboardServer):
    """Web server of the teleoperation page."""

    max_clients: ClassVar[int] = 1
    max_message: ClassVar[int] = 4096
    niceness: ClassVar[int] = 0  # commands of a person must not wait

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._second, self._count = 0, 0  # current second, and messages in it

    def receive(self, message: str | bytes) -> bytes | None:
        """Convert an input or a command; None for other messages and for too many."""
        now = time.monotonic()
        self._second, self._count = int(now), self._count + 1 if int(now) == self._second else 1
        if self._count > MAX_RATE or not isinstance(message, str):
            return None
        if message.startswith('{"input":'):
            return INPUT + struct.pack("<d", now) + message.encode()
        return super().receive(message)


if __name__ == "__main__":
    sys.exit(main(server=OperatorServer))
