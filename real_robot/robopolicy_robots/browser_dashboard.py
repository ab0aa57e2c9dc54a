"""Browser dashboard of a run, updated by the control loop without waiting.

The dashboard runs in its own process (`robopolicy.deploy.dashboard`). A packet that does not fit at once is dropped,
nothing is sent without a viewer, and the robot continues if the dashboard dies. The page can send one message: the
emergency stop.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.deploy.dashboard import NO_CLIENTS, ENCODED, CLIENT_CONNECTED, Dashboard, pixels_packet
from robopolicy.deploy.safety.motion import Array
from robopolicy_robots.messages import CATALOGUE, CompressedImage, Image
from robopolicy_robots.metrics import RunMetrics
from robopolicy_robots.robot import QOS_PROFILES, RobotSpec
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import Subscription, Transport

log = logging.getLogger(__name__)
PERIOD = 0.1  # [s] between figures
PLOT_PERIOD = 0.02  # [s] between points of the plots
PICTURES = 5.0  # frames per second and camera
EDGE = 160  # maximum pixels of the longer side of an image, by subsampling
PAGE = Path(__file__).parent / "browser_dashboard.html"
PRESSED = "estop"  # command of the page


class BrowserDashboard:
    """Dashboard process with its updates; `close` ends it.

    Args:
        address: Listening address, `HOST:PORT` or `PORT`.
        figures: Metrics to show.

    Raises:
        UserError: The address cannot be opened; one line.
    """

    def __init__(self, address: str, metrics: RunMetrics) -> None:
        self.estop_pressed = False  # the emergency stop was pressed
        self.dropped = 0  # packets that did not fit
        self._figures, self._robot = metrics, metrics.robot
        self._cameras: list[tuple[str, Subscription[Any]]] = []
        self._watched = self._gone = False
        self._rows: list[list[Any]] = []  # rows of the plots: time, measured, wanted, command
        self._traced = self._updated = self._looked = -np.inf  # [s]
        self._state: State | None = None  # that was sent last
        self._shown: dict[str, int] = {}  # {camera: sequence number of the last sent image}
        self._page = Dashboard(address, PAGE, [PRESSED])
        self.url = self._page.url

    def watch(self, transport: Transport) -> None:
        """Show the robot's cameras as they come over `transport`."""
        self._cameras = [
            (camera.name, transport.subscribe(camera.topic, CATALOGUE[camera.type], QOS_PROFILES[camera.qos]))
            for camera in self._robot.cameras
        ]
        self._shown.clear()

    def update(self, tick: Tick) -> None:
        """Send due updates after a tick; takes a few microseconds, and a few hundred every `PERIOD`."""
        self._poll()
        if not self._watched:
            return
        try:
            self._send_updates(tick)
        except Exception as error:  # the dashboard must not stop a robot
            self._watched = False
            log.warning("The dashboard was stopped by an error: %s", error)

    def close(self) -> None:
        """End the dashboard; safe to call twice."""
        self._page.close()

    def _send_updates(self, tick: Tick) -> None:
        now = time.monotonic()
        if now - self._traced > 0.9 * PLOT_PERIOD:
            self._traced = now
            columns = (tick.measured, tick.target, tick.command)
            self._rows.append([round(tick.now, 4), *(_plain(column) for column in columns)])
        if now - self._updated >= PERIOD or tick.state is not self._state:
            self._updated, self._state = now, tick.state
            figures = self._figures.snapshot() | {"joints": joints_of(self._robot), "rows": self._rows}
            self._send(json.dumps(figures, allow_nan=False).encode())
            self._rows = []
        elif self._cameras and now - self._looked >= 1.0 / (PICTURES * len(self._cameras)):
            self._looked = now
            self._send_image()

    def _poll(self) -> None:
        said = self._page.poll()
        if said is None:
            return
        if said == PRESSED.encode():
            self.estop_pressed = True
        elif said in (CLIENT_CONNECTED, NO_CLIENTS):
            self._watched, self._rows = said == CLIENT_CONNECTED, []
        elif not self._gone:  # the end of the file
            self._gone, self._watched = True, False
            log.warning("The dashboard has ended; the robot continues")

    def _send(self, packet: bytes) -> None:
        self.dropped += not self._page.send(packet)  # full, too long, or gone, which `_poll` finds out

    def _send_image(self) -> None:
        """Send the image of the next camera, if there is a new one."""
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
    """Values for JSON, None for numbers that are not finite."""
    if values is None:
        return None
    return [round(value, 5) if np.isfinite(value) else None for value in np.asarray(values, np.float64).tolist()]
