"""Page in a browser that reads keyboard, gamepad and touch, for a robot whose computer is not the operator's.

The page sends its state 50 times per second. It lets go when it loses the focus, is hidden, or disconnects; the age of
its messages is measured here, on the clock of this machine.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.dashboard import CLIENT_CONNECTED, NO_CLIENTS, Dashboard, pixels_packet
from robopolicy.teleop.bindings import BUTTONS, ENABLE_BUTTON, EVENT_BUTTONS, HELP, KEYS, STICKS
from robopolicy.teleop.browser_server import INPUT
from robopolicy.teleop.contract import AXES, EVENTS, STOP, SessionStatus, Teleop, TeleopCommand, read_numbers

PAGE = Path(__file__).parent / "browser_page.html"
SERVER = "robopolicy.teleop.browser_server"
ADDRESS = "127.0.0.1:8782"
STATUS_PERIOD = 0.1  # [s] between updates of an unchanged status
BINDINGS = {
    "axes": AXES,
    "keys": {f"Key{key.upper()}": binding for key, binding in KEYS.items()},
    "sticks": STICKS,
    "buttons": BUTTONS,
    "enable": ENABLE_BUTTON,
    "events": EVENT_BUTTONS,
    "help": HELP,
}


class BrowserTeleop(Teleop):
    """Page at ARGUMENT (`[HOST:]PORT`), by default 127.0.0.1:8782; beyond loopback it needs ROBOPOLICY_TOKEN."""

    module = "websockets"
    extra = "remote"
    shows_images: ClassVar[bool] = True

    def __init__(self, address: str = ADDRESS) -> None:
        self._page = Dashboard(address, PAGE, EVENTS, SERVER)
        self.url = self._page.url
        self.malformed = 0  # messages that were no valid input
        self._command = TeleopCommand()
        self._number = -1.0  # of the newest message
        self._sent: tuple[SessionStatus | None, float] = (None, -np.inf)  # last status and its time [s]

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Serve the page and print its address."""
        device = cls(argument or ADDRESS)
        print(f"move with the page {device.url}", flush=True)  # noqa: T201
        return device

    def read(self, now: float) -> TeleopCommand:
        """Return the newest command of the page; without a client it is old."""
        events: list[str] = []
        while (message := self._page.poll()) is not None:
            if message == b"":  # the server has ended
                events.append(STOP)
                break
            if message.startswith(INPUT):
                self._receive(message)
            elif message in (CLIENT_CONNECTED, NO_CLIENTS):
                self._command, self._number, self._sent = TeleopCommand(), -1.0, (None, -np.inf)
            else:
                events.append(message.decode())
        command, stamp = self._command, min(self._command.stamp, now)  # it may have arrived after `now`
        return TeleopCommand(command.enabled, command.twist, command.gripper, None, tuple(events), stamp)

    def show(self, status: SessionStatus, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Send the status when it changes, and the images."""
        now = time.monotonic()
        if status != self._sent[0] or now - self._sent[1] > STATUS_PERIOD:
            self._sent = status, now
            shown = {"title": status.title, "actor": status.actor, "rows": status.rows, "bindings": BINDINGS}
            self._page.send(json.dumps(shown).encode())
        for camera, image in images.items():
            self._page.send(pixels_packet(camera, image))

    def close(self) -> None:
        """End the page."""
        self._page.close()

    def _receive(self, message: bytes) -> None:
        (stamp,) = struct.unpack_from("<d", message, len(INPUT))
        try:
            found: Any = json.loads(message[len(INPUT) + 8 :])["input"]
            numbers = read_numbers(found["axes"], len(AXES))
            rest = read_numbers([found["number"], found["gripper"]], 2)
            enabled = found["enabled"]
        except (ValueError, TypeError, LookupError, RecursionError):
            numbers = rest = enabled = None
        if numbers is None or rest is None or not isinstance(enabled, bool):
            self.malformed += 1
            return
        if rest[0] <= self._number:  # reordered or repeated
            self.malformed += 1
            return
        self._number = float(rest[0])
        self._command = TeleopCommand(enabled, numbers, float(rest[1]), None, (), stamp)
