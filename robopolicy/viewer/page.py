"""Page for a browser that shows episodes in 3D by viser.

The page listens on 127.0.0.1 without authentication, and loads nothing from other hosts.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.viewer.frames import EpisodeFrame, EpisodeSource
from robopolicy.viewer.live import LiveEpisodes, LivePlayback
from robopolicy.viewer.panel import Curve, Panel
from robopolicy.viewer.playback import Playback
from robopolicy.viewer.scene import BodyScene, draw_path, draw_pictures, make_scene

HOST = "127.0.0.1"
RATE = 30.0  # [Hz] of the loop
PANEL_PERIOD = 0.1  # [s] between updates of the panel
PHONE_DISTANCE, PHONE_SHIFT = 1.5, 0.35  # of the camera in high windows, relative to its distance in wide ones
BRAND = (47, 111, 222)  # colour of the controls


class Page:
    """Server of the page and the loop that shows episodes; `close` ends it.

    Args:
        source: Episodes to show.
        port: Port on 127.0.0.1; 0 is a free one.
        metrics: Function that returns the metrics of a training run by name.

    Raises:
        UserError: The port is in use, or viser or mjviser is missing.
    """

    def __init__(
        self, source: EpisodeSource, port: int = 0, metrics: Callable[[], Mapping[str, Curve]] | None = None
    ) -> None:
        viser = require("viser", "viewer")
        require("mjviser", "viewer")
        self.playback = LivePlayback(source) if isinstance(source, LiveEpisodes) else Playback(source)
        port = free_port(port)
        with redirect_stdout(io.StringIO()):  # its greeting
            self.server: Any = viser.ViserServer(host=HOST, port=port, label=source.title, verbose=False)
        self.url = f"http://{HOST}:{self.server.get_port()}"
        self.server.gui.configure_theme(show_logo=False, show_share_button=False, brand_color=BRAND)
        self.server.on_client_connect(_fit_phone)
        self._scene = self._make_scene(self.playback.frame)
        self._panel = Panel(self.server.gui, self.playback, self._scene, metrics)
        self._shown: EpisodeFrame | None = None
        self._plan: Any = None  # plan that is drawn
        self._panel_time = -np.inf  # [s] of the last update of the panel
        self.update(0.0)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Play until `until` returns True; time stands still while no browser is connected."""
        last = time.monotonic()
        while not until():
            now = time.monotonic()
            self.update(now - last if self.server.get_clients() else 0.0)
            last = now
            time.sleep(max(0.0, 1 / RATE - (time.monotonic() - now)))

    def update(self, seconds: float) -> None:
        """Carry out what the user asked for, let time pass [s], and show the current frame."""
        if self._panel.carry_out():
            self._shown = self._plan = None
            self._panel_time = -np.inf
        self.playback.advance(seconds)
        frame = self.playback.frame
        if frame is not self._shown:
            self._shown = frame
            self._show(frame)
        if time.monotonic() - self._panel_time > PANEL_PERIOD:
            self._panel_time = time.monotonic()
            with self.server.atomic():
                self._panel.show(frame)

    def close(self) -> None:
        """Stop the server; safe to call twice."""
        self._panel.close()
        with redirect_stdout(io.StringIO()):
            self.server.stop()

    def _make_scene(self, frame: EpisodeFrame) -> BodyScene | None:
        return None if frame.state is None else make_scene(self.server, frame.state)

    def _show(self, frame: EpisodeFrame) -> None:
        """Show the bodies and the predicted path, or the images of an episode without bodies."""
        with self.server.atomic():
            self._panel.show_time()
            if frame.state is None:
                draw_pictures(self.server, frame.images)
                return
            if self._scene is None or not self._scene.fits(frame.state):
                self._scene = self._panel.scene = self._make_scene(frame)
                self._plan = None
                assert self._scene is not None
            if frame.plan is not self._plan:
                self._plan = frame.plan
                draw_path(self.server, self._scene.path(frame.plan, self._panel.path_point))
            self._scene.show(frame.state)


def _fit_phone(client: Any) -> None:
    """Move the camera of a browser whose window is higher than wide, where the panel covers the lower part."""
    camera = client.camera
    if camera.aspect < 1:
        offset = camera.position - camera.look_at
        target = camera.look_at - np.array([0.0, 0.0, PHONE_SHIFT * np.linalg.norm(offset)])
        camera.position, camera.look_at = target + PHONE_DISTANCE * offset, target


def free_port(port: int) -> int:
    """Return `port`, or a free one for 0; a UserError is raised if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"Port {port} of {HOST} cannot be opened ({error.strerror}); choose another port."
            ) from error
        return probe.getsockname()[1]
