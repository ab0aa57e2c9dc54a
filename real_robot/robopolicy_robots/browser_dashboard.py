"""Browser dashboard of a run, in its own process (`robopolicy.deploy.dashboard`).

The control loop never blocks on it: packets that do not fit into the socket are dropped, nothing is sent without a
client, and the loop continues after the process ends. The page can send one command, the emergency stop.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.deploy.dashboard import CLIENT_CONNECTED, ENCODED, NO_CLIENTS, Dashboard, pixels_packet
from robopolicy.deploy.safety.motion import Array
from robopolicy_robots.messages import CATALOGUE, CompressedImage, Image
from robopolicy_robots.metrics import RunMetrics
from robopolicy_robots.robot import QOS_PROFILES, RobotSpec
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import Subscription, Transport

log = logging.getLogger(__name__)
METRICS_PERIOD = 0.1  # [s] between updates of the metrics
PLOT_PERIOD = 0.02  # [s] between points of the plots
IMAGE_RATE = 5.0  # frames per second and camera
MAX_IMAGE_EDGE = 160  # [pixels] longer side of an image after subsampling
PAGE = Path(__file__).parent / "browser_dashboard.html"
ESTOP_COMMAND = "estop"  # command of the page


class BrowserDashboard:
    """Dashboard process and its updates; `close` ends the process.

    Args:
        address: Listening address, `HOST:PORT` or `PORT`.
        metrics: Metrics to show.

    Raises:
        UserError: The address cannot be opened.
    """

    def __init__(self, address: str, metrics: RunMetrics) -> None:
        self.estop_pressed = False
        self.dropped = 0  # packets that did not fit
        self._metrics, self._robot = metrics, metrics.robot
        self._cameras: list[tuple[str, Subscription[Any]]] = []
        self._watched = self._gone = False
        self._rows: list[list[Any]] = []  # rows of the plots: time, measured, target, command
        self._last_row = self._last_metrics = self._last_image = -np.inf  # [s] times of the last updates
        self._state: State | None = None  # last sent state
        self._sequences: dict[str, int] = {}  # {camera: sequence number of the last sent image}
        self._page = Dashboard(address, PAGE, [ESTOP_COMMAND])
        self.url = self._page.url

    def watch(self, transport: Transport) -> None:
        """Subscribe to the robot's cameras on `transport`."""
        self._cameras = [
            (camera.name, transport.subscribe(camera.topic, CATALOGUE[camera.type], QOS_PROFILES[camera.qos]))
            for camera in self._robot.cameras
        ]
        self._sequences.clear()

    def update(self, tick: Tick) -> None:
        """Send due updates after a tick; takes a few microseconds, or a few hundred every `METRICS_PERIOD`."""
        self._poll()
        if not self._watched:
            return
        try:
            self._send_updates(tick)
        except Exception as error:  # an error of the dashboard must not stop the robot
            self._watched = False
            log.warning("The dashboard was stopped by an error: %s", error)

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._page.close()

    def _send_updates(self, tick: Tick) -> None:
        now = time.monotonic()
        if now - self._last_row > 0.9 * PLOT_PERIOD:
            self._last_row = now
            columns = (tick.measured, tick.target, tick.command)
            self._rows.append([round(tick.now, 4), *(_plain(column) for column in columns)])
        if now - self._last_metrics >= METRICS_PERIOD or tick.state is not self._state:
            self._last_metrics, self._state = now, tick.state
            metrics = self._metrics.snapshot() | {"joints": _joint_ranges(self._robot), "rows": self._rows}
            self._send(json.dumps(metrics, allow_nan=False).encode())
            self._rows = []
        elif self._cameras and now - self._last_image >= 1.0 / (IMAGE_RATE * len(self._cameras)):
            self._last_image = now
            self._send_image()

    def _poll(self) -> None:
        message = self._page.poll()
        if message is None:
            return
        if message == ESTOP_COMMAND.encode():
            self.estop_pressed = True
        elif message in (CLIENT_CONNECTED, NO_CLIENTS):
            self._watched, self._rows = message == CLIENT_CONNECTED, []
        elif not self._gone:  # the end of the file
            self._gone, self._watched = True, False
            log.warning("The dashboard has ended; the robot continues")

    def _send(self, packet: bytes) -> None:
        self.dropped += not self._page.send(packet)  # full socket, long packet, or ended process (see `_poll`)

    def _send_image(self) -> None:
        """Send the image of the next camera, if there is a new one."""
        name, subscription = self._cameras[0]
        self._cameras.append(self._cameras.pop(0))
        received = subscription.latest()
        if received is None or received.sequence == self._sequences.get(name):
            return
        self._sequences[name] = received.sequence
        message = received.message
        if isinstance(message, CompressedImage):
            self._send(ENCODED + name.encode() + b"\0" + message.data.tobytes())
        elif isinstance(message, Image):
            try:
                pixels = message.pixels
            except ValueError:
                return
            skip = -(-max(pixels.shape[:2]) // MAX_IMAGE_EDGE)
            small = pixels[::skip, ::skip, :3]
            if message.encoding.startswith("bgr"):
                small = small[:, :, ::-1]
            self._send(pixels_packet(name, small))


def _joint_ranges(robot: RobotSpec) -> list[list[Any]]:
    """Name, unit, low and high of every joint, for the plots."""
    return [[joint.name, joint.unit, *(_plain(np.array([joint.low, joint.high])) or [])] for joint in robot.joints]


def _plain(values: Array | None) -> list[float | None] | None:
    """Values for JSON, with None for numbers that are not finite."""
    if values is None:
        return None
    return [round(value, 5) if np.isfinite(value) else None for value in np.asarray(values, np.float64).tolist()]
