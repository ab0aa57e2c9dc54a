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
AIM_ATTEMPTS, AIM_PERIOD = 10, 0.5  # of moving the camera of a new browser, and seconds between them
PHONE_DISTANCE, PHONE_SHIFT = 2.0, 0.42  # of the camera in high windows, relative to its distance in wide ones
LOADING = "<div style='padding:0.9em'>Loading &hellip;</div>"
BRAND = (47, 111, 222)  # colour of the controls


class PageServer:
    """Server of an empty page, which browsers can load before the episodes are ready.

    Args:
        title: Title until a `Page` fills it.
        port: Port on 127.0.0.1; 0 is a free one.

    Raises:
        UserError: The port is in use, or viser is missing.
    """

    def __init__(self, title: str, port: int = 0) -> None:
        viser = require("viser", "viewer")
        port = _free_port(port)
        with redirect_stdout(io.StringIO()):  # its greeting
            self.viser: Any = viser.ViserServer(host=HOST, port=port, label=title, verbose=False)
        self.url = f"http://{HOST}:{self.viser.get_port()}"
        self.viser.gui.configure_theme(show_logo=False, show_share_button=False, brand_color=BRAND)
        self._loading = self.viser.gui.add_html(LOADING)

    def begin(self, title: str) -> None:
        """Show the title of the episodes, and aim the cameras at the scene, also of browsers that are waiting."""
        self._loading.remove()
        self.viser.gui.set_panel_label(title)
        self.viser.on_client_connect(self._aim)  # and for browsers that are connected already

    def _aim(self, client: Any) -> None:
        """Move the camera of a browser to its first position until it stays; slow browsers reset it while they load."""
        camera, initial = client.camera, self.viser.initial_camera
        position, look_at = initial.position, initial.look_at
        if camera.aspect < 1:  # a phone, on which the panel covers the lower part
            offset = position - look_at
            look_at = look_at - np.array([0.0, 0.0, PHONE_SHIFT * np.linalg.norm(offset)])
            position = look_at + PHONE_DISTANCE * offset
        resets = camera.position, initial.position
        for _ in range(AIM_ATTEMPTS):
            if any(np.allclose(camera.position, reset, atol=1e-3) for reset in resets):  # not moved by the user
                camera.fov, camera.position, camera.look_at = initial.fov, position, look_at
            time.sleep(AIM_PERIOD)

    def close(self) -> None:
        """Stop the server; safe to call twice."""
        with redirect_stdout(io.StringIO()):
            self.viser.stop()


class Page:
    """Loop that shows episodes on the page of a server.

    Args:
        server: Server of the page.
        source: Episodes to show.
        metrics: Function that returns the metrics of a training run by name.

    Raises:
        UserError: The package mjviser is missing.
    """

    def __init__(
        self, server: PageServer, source: EpisodeSource, metrics: Callable[[], Mapping[str, Curve]] | None = None
    ) -> None:
        require("mjviser", "viewer")
        self.playback = LivePlayback(source) if isinstance(source, LiveEpisodes) else Playback(source)
        self._viser = server.viser
        self._shown: EpisodeFrame | None = self.playback.frame
        self._scene = self._make_scene(self.playback.frame)
        self._panel = Panel(self._viser.gui, self.playback, self._scene, metrics)
        self._plan: Any = None  # plan that is drawn
        self._panel_time = -np.inf  # [s] of the last update of the panel
        self._show(self.playback.frame)
        self._panel.show_numbers()  # pictures follow in the loop, since the first one takes a second
        server.begin(source.title)

    @property
    def is_open(self) -> bool:
        """Whether a browser shows the page."""
        return bool(self._viser.get_clients())

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Play until `until` returns True; time stands still while no browser is connected."""
        last = time.monotonic()
        while not until():
            now = time.monotonic()
            self.update(now - last if self.is_open else 0.0)
            last = now
            time.sleep(max(0.0, 1 / RATE - (time.monotonic() - now)))

    def update(self, seconds: float) -> None:
        """Carry out what the user asked for, let time pass [s], and show the current frame."""
        if self._panel.carry_out():
            self._plan = self._shown = None
            self._panel_time = -np.inf
        self.playback.advance(seconds)
        frame = self.playback.frame
        if frame is not self._shown:
            self._shown = frame
            self._show(frame)
        if time.monotonic() - self._panel_time > PANEL_PERIOD:
            self._panel_time = time.monotonic()
            with self._viser.atomic():
                self._panel.show_numbers()
                self._panel.show_pictures(frame)

    def close(self) -> None:
        """Free the renderer; safe to call twice."""
        self._panel.close()

    def _make_scene(self, frame: EpisodeFrame) -> BodyScene | None:
        return None if frame.state is None else make_scene(self._viser, frame.state)

    def _show(self, frame: EpisodeFrame) -> None:
        """Show the bodies and the predicted path, or the images of an episode without bodies."""
        with self._viser.atomic():
            self._panel.show_time()
            if frame.state is None:
                draw_pictures(self._viser, frame.images)
                return
            if self._scene is None or not self._scene.fits(frame.state):
                self._scene = self._panel.scene = self._make_scene(frame)
                self._plan = None
                assert self._scene is not None
            if frame.plan is not self._plan:
                self._plan = frame.plan
                draw_path(self._viser, self._scene.path(frame.plan, self._panel.path_point))
            self._scene.show(frame.state)


def _free_port(port: int) -> int:
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
