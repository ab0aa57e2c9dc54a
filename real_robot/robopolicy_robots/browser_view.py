"""The viewer in a browser, the control loop's end of it: hands over what is worth seeing, and never waits for anyone.

The viewer is a process of its own (`robopolicy.deploy.dashboard`). A packet that does not fit at once is left out,
nothing is handed over while nobody watches, and if the viewer dies the robot goes on. Back comes one thing alone: that
somebody pressed the button.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.deploy.dashboard import ALONE, ENCODED, WATCHED, Page, pixels_packet
from robopolicy.deploy.safety.motion import Array
from robopolicy_robots.figures import Figures
from robopolicy_robots.messages import CATALOGUE, CompressedImage, Image
from robopolicy_robots.robot import QUALITIES, RobotSpec
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import Subscription, Transport

log = logging.getLogger(__name__)
PERIOD = 0.1  # [s] between figures
TRACE = 0.02  # [s] between points of the plots
PICTURES = 5.0  # a second, of each camera
EDGE = 160  # most pixels of a picture's longer side; others are left out, in rows and columns
PAGE = Path(__file__).parent / "browser_page.html"
PRESSED = "estop"  # what the page says


class BrowserView:
    """Starts the viewer and keeps it up to date; `close` ends it.

    Args:
        address: Where it listens, `HOST:PORT` or `PORT`.
        figures: What it shows.

    Raises:
        UserError: It cannot listen there; one line.
    """

    def __init__(self, address: str, figures: Figures) -> None:
        self.pressed = False  # somebody pressed the emergency stop
        self.left_out = 0  # packets that did not fit
        self._figures, self._robot = figures, figures.robot
        self._cameras: list[tuple[str, Subscription[Any]]] = []
        self._watched = self._gone = False
        self._rows: list[list[Any]] = []  # of the plots: time, measured, wanted, command
        self._traced = self._told = self._looked = -np.inf  # [s]
        self._state: State | None = None  # that was handed over last
        self._shown: dict[str, int] = {}  # {camera: sequence of the picture that was handed over}
        self._page = Page(address, PAGE, [PRESSED])
        self.url = self._page.url

    def watch(self, transport: Transport) -> None:
        """Show the robot's cameras as they come over `transport`."""
        self._cameras = [
            (camera.name, transport.subscribe(camera.topic, CATALOGUE[camera.kind], QUALITIES[camera.qos]))
            for camera in self._robot.cameras
        ]
        self._shown.clear()

    def update(self, tick: Tick) -> None:
        """Hand over what is due after a tick; takes some microseconds, and some hundred every `PERIOD`."""
        self._hear()
        if not self._watched:
            return
        try:
            self._hand_over(tick)
        except Exception as error:  # nobody's curiosity may stop a robot
            self._watched = False
            log.warning("The viewer in the browser shows no more: %s", error)

    def close(self) -> None:
        """End the viewer; may be called twice."""
        self._page.close()

    def _hand_over(self, tick: Tick) -> None:
        now = time.monotonic()
        if now - self._traced > 0.9 * TRACE:
            self._traced = now
            columns = (tick.measured, tick.wanted, tick.command)
            self._rows.append([round(tick.now, 4), *(_plain(column) for column in columns)])
        if now - self._told >= PERIOD or tick.state is not self._state:
            self._told, self._state = now, tick.state
            figures = self._figures.snapshot() | {"joints": joints_of(self._robot), "rows": self._rows}
            self._send(json.dumps(figures, allow_nan=False).encode())
            self._rows = []
        elif self._cameras and now - self._looked >= 1.0 / (PICTURES * len(self._cameras)):
            self._looked = now
            self._look()

    def _hear(self) -> None:
        said = self._page.hear()
        if said is None:
            return
        if said == PRESSED.encode():
            self.pressed = True
        elif said in (WATCHED, ALONE):
            self._watched, self._rows = said == WATCHED, []
        elif not self._gone:  # the end of the file
            self._gone, self._watched = True, False
            log.warning("The viewer in the browser has ended; the robot goes on")

    def _send(self, packet: bytes) -> None:
        self.left_out += not self._page.send(packet)  # full, too long, or gone, which `_hear` finds out

    def _look(self) -> None:
        """Hand over the picture of the camera whose turn it is, if there is a new one."""
        name, subscription = self._cameras[0]
        self._cameras.append(self._cameras.pop(0))
        received = subscription.latest()
        if received is None or received.sequence == self._shown.get(name):
            return
        self._shown[name] = received.sequence
        message = received.message
        if isinstance(message, CompressedImage):
            self._send(ENCODED + name.encode() + b"\0" + message.data.tobytes())
        elif isinstance(message, Image):
            try:
                pixels = message.pixels
            except ValueError:
                return
            skip = -(-max(pixels.shape[:2]) // EDGE)
            small = pixels[::skip, ::skip, :3]
            if message.encoding.startswith("bgr"):
                small = small[:, :, ::-1]
            self._send(pixels_packet(name, small))


def joints_of(robot: RobotSpec) -> list[list[Any]]:
    """Name, unit and range of every joint, for the plots."""
    return [[joint.name, joint.unit, *(_plain(np.array([joint.low, joint.high])) or [])] for joint in robot.joints]


def _plain(values: Array | None) -> list[float | None] | None:
    """Numbers as JSON has them, those that are not finite as None."""
    if values is None:
        return None
    return [round(value, 5) if np.isfinite(value) else None for value in np.asarray(values, np.float64).tolist()]
