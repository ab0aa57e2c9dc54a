"""Panel of the page: playback, cameras, plots and options of the 3D view."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.physics_state import MujocoState
from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.live import LivePlayback
from robopolicy.viewer.playback import Playback
from robopolicy.viewer.scene import BodyScene, MujocoScene

METRICS_PERIOD = 2.0  # [s] between updates of the metrics of a training run
PICTURE_SIZE = (240, 320)  # height and width of pictures of the model's cameras [pixels]
SPEEDS = {"1/4 x": 0.25, "1/2 x": 0.5, "1 x": 1.0, "2 x": 2.0, "4 x": 4.0}
PREVIOUS, PAUSE, PLAY, NEXT = "Previous", "Pause", "Play", "Next"
NO_CAMERA, ACTION = "none", "action"
MAX_LINES = 12  # lines in a plot
MAX_EVENTS, EVENT = 4, ("#868e96", "#c92a2a")  # newest events in the status, and colours of normal ones and warnings
COLOURS = ("#2f6fde", "#e8590c", "#2b8a3e", "#c2255c", "#7048e8", "#0b7285", "#a07000", "#495057")
SOFT_RANGE = {"min": {"pad": 0.1, "soft": 0, "mode": 1}, "max": {"pad": 0.1, "soft": 1, "mode": 1}}  # at least 0 to 1
SUCCESS, RUNNING, FAILURE = ("success", "#2b8a3e"), ("no success yet", "#868e96"), ("failure", "#c92a2a")

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Updates and values of a metric."""


class Panel:
    """Controls and displays of a playback.

    Args:
        gui: Interface of viser for panels.
        playback: Playback to control.
        scene: 3D scene; None if the episodes have no bodies.
        metrics: Function that returns the metrics of a training run by name, if there is one.

    Requests of the user are kept until the loop of the page calls `carry_out`, since viser runs callbacks in threads.
    """

    def __init__(
        self,
        gui: Any,
        playback: Playback,
        scene: BodyScene | None,
        metrics: Callable[[], Mapping[str, Curve]] | None = None,
    ) -> None:
        self.scene = scene
        self._gui, self._playback, self._metrics = gui, playback, metrics
        self._requests: list[Callable[[], None]] = []
        self._pictures: dict[str, Any] = {}  # handles of images by name
        self._renderer: tuple[mujoco.MjModel, Renderer] | None = None
        self._measured = -np.inf  # [s] time of the last update of the metrics
        self._problem = ""  # with the pictures of the model's cameras
        self._add_playback()
        self._add_cameras()
        self._add_plots()
        self._add_view()

    @property
    def path_point(self) -> str:
        """Name of the point whose predicted path is shown."""
        return str(self._path_point.value)

    def carry_out(self) -> bool:
        """Carry out the requests of the user; return whether there were any."""
        requests, self._requests = self._requests, []
        for request in requests:
            request()
        return bool(requests)

    def show_time(self) -> None:
        """Move the time bar to the current frame."""
        self._time.value = min(self._playback.index * self._playback.source.control_dt, self._time.max)

    def show_numbers(self) -> None:
        """Show texts and plots up to the current frame."""
        self._time.max = self._duration()
        self._episode.value = self._playback.episode
        if isinstance(self._playback, LivePlayback):
            self._follow.value = self._playback.follows
        self._buttons.options = (PREVIOUS, PAUSE if self._playback.playing else PLAY, NEXT)
        self._status.content = self._status_html()
        self._show_plots()

    def close(self) -> None:
        """Free the renderer; safe to call twice."""
        if self._renderer is not None:
            self._renderer[1].close()
            self._renderer = None

    def _add_playback(self) -> None:
        gui, playback = self._gui, self._playback
        self._status = gui.add_html("")
        self._time = gui.add_slider("Time [s]", 0.0, self._duration(), playback.source.control_dt, 0.0)
        self._buttons = gui.add_button_group("", (PREVIOUS, PAUSE, NEXT))
        self._episode = gui.add_number("Episode", 0, min=0, step=1)
        self._speed = gui.add_dropdown("Speed", tuple(SPEEDS), initial_value="1 x")
        if isinstance(playback, LivePlayback):
            self._follow = gui.add_checkbox("Live", True, hint="Show the newest frame; the time bar goes back in time.")
            self._on(self._follow, lambda: setattr(playback, "follows", self._follow.value))
        self._repeat = gui.add_checkbox("Repeat", False, hint="Show the same episode again after its end.")
        self._on(self._time, lambda: playback.seek(float(self._time.value)))
        self._on(self._episode, lambda: playback.open(int(self._episode.value)))
        self._on(self._speed, lambda: setattr(playback, "speed", SPEEDS[self._speed.value]))
        self._on(self._repeat, lambda: setattr(playback, "repeats", self._repeat.value))
        self._buttons.on_click(lambda event: self._requests.append(lambda: self._press(event.target.value)))

    def _add_cameras(self) -> None:
        names = _camera_names(self._playback.frame)
        self._cameras = self._gui.add_folder("Cameras", visible=bool(names or self._playback.frame.images))
        with self._cameras:
            options = (NO_CAMERA, *names)
            self._camera = self._gui.add_dropdown(
                "Camera", options, initial_value=(*names, NO_CAMERA)[0], visible=bool(names)
            )

    def _add_plots(self) -> None:
        keys = tuple(dict.fromkeys((*self._playback.frame.vectors, ACTION)))
        with self._gui.add_folder("Plots"):
            self._return_plot = self._add_plot("Return", 1, SOFT_RANGE)
            self._key = self._gui.add_dropdown("Numbers", keys)
            lines = MAX_LINES * (2 if isinstance(self._playback, LivePlayback) else 1)  # the chunk has lines of its own
            self._numbers_plot = self._add_plot(None, lines)
        if self._metrics is not None:
            with self._gui.add_folder("Training"):
                self._metric = self._gui.add_dropdown("Metric", tuple(self._metrics()) or ("update",))
                self._metric_plot = self._add_plot(None, 1)

    def _add_plot(self, title: str | None, lines: int, values: Any = None) -> Any:
        style = {"width": 1.5, "points": {"show": False}}
        dashes = ({}, {"dash": (4, 3)})  # of the lines beyond `MAX_LINES`
        scales = {"x": {"time": False}} | ({} if values is None else {"y": {"range": values}})
        return self._gui.add_uplot(
            tuple(np.zeros(1) for _ in range(lines + 1)),
            (
                {},
                *(
                    {"stroke": COLOURS[line % MAX_LINES % len(COLOURS)], **dashes[line // MAX_LINES], **style}
                    for line in range(lines)
                ),
            ),
            title=title,
            height=150,
            legend={"show": False},
            scales=scales,
            padding=(8, 12, 0, 0),
        )

    def _add_view(self) -> None:
        scene = self.scene
        if scene is None:
            return
        with self._gui.add_folder("View", expand_by_default=False):
            follow = self._gui.add_checkbox("Follow the robot", scene.follows)
            self._path_point = self._gui.add_dropdown("Predicted path of", tuple(scene.points))
            self._on(follow, lambda: setattr(self.scene, "follows", follow.value))
            self._on(self._path_point, lambda: None)  # a request of any kind draws again
            if isinstance(scene, MujocoScene):
                collisions = self._gui.add_checkbox("Collision shapes", False)
                self._on(collisions, lambda: setattr(self.scene, "collisions", collisions.value))

    def _on(self, handle: Any, request: Callable[[], None]) -> None:
        """Keep `request` when the user, rather than this program, changes the value of `handle`."""
        handle.on_update(lambda event: self._requests.append(request) if event.client is not None else None)

    def _press(self, button: str) -> None:
        playback = self._playback
        if button == PREVIOUS:
            playback.open(playback.episode - 1)
        elif button == NEXT:
            playback.open(playback.episode + 1)
        elif playback.playing:
            playback.playing = False
        else:
            playback.playing = True
            if playback.at_end:
                playback.open(playback.episode)

    def _show_plots(self) -> None:
        playback = self._playback
        frames = playback.frames[: playback.index + 1]
        times = np.arange(len(frames)) * playback.source.control_dt
        self._return_plot.data = (times, np.cumsum([frame.reward for frame in frames]))
        table = _table(frames, self._key.value, len(self._numbers_plot.data) - 1)
        self._numbers_plot.data = (np.arange(table.shape[1]) * playback.source.control_dt, *table)
        if self._metrics is not None and time.monotonic() - self._measured > METRICS_PERIOD:
            self._measured = time.monotonic()
            found = self._metrics()
            if found and set(self._metric.options) != set(found):
                self._metric.options = tuple(found)
            if self._metric.value in found:
                self._metric_plot.data = found[self._metric.value]

    def show_pictures(self, frame: EpisodeFrame) -> None:
        """Show the images of the observation, and the picture of the chosen camera of the model."""
        pictures = dict(frame.images)
        camera = self._camera.value
        if camera != NO_CAMERA and isinstance(frame.state, MujocoState):
            try:
                pictures[f"camera {camera}"] = self._picture(frame.state, camera)
            except UserError as error:  # without OpenGL
                self._problem, self._camera.value = str(error), NO_CAMERA
        for name in self._pictures.keys() - pictures.keys():
            self._pictures.pop(name).remove()
        for name, picture in pictures.items():
            if name in self._pictures:
                self._pictures[name].image = picture
            else:
                with self._cameras:
                    self._pictures[name] = self._gui.add_image(picture, label=name, format="jpeg")

    def _picture(self, state: MujocoState, camera: str) -> NDArray[np.uint8]:
        if self._renderer is None or self._renderer[0] is not state.model:
            self.close()
            self._renderer = state.model, Renderer(state.model, *PICTURE_SIZE)
        state.apply(self._renderer[1].data)
        return self._renderer[1].frame(camera).copy()

    def _duration(self) -> float:
        return max(1, self._playback.length - 1) * self._playback.source.control_dt

    def _status_html(self) -> str:
        playback = self._playback
        badge = ""
        if playback.success is not None:
            text, colour = SUCCESS if playback.success else FAILURE if playback.at_end else RUNNING
            style = f"background:{colour};color:#fff;border-radius:4px;padding:1px 8px;font-weight:600"
            badge = f"<span style='{style}'>{text}</span>"
        dt = playback.source.control_dt
        remarks = (text for text in (playback.source.note(), self._problem) if text)
        events = [
            f"<span style='color:{EVENT[event.is_warning]}'>{index * dt:.2f} s {html.escape(event.text)}</span>"
            for index, frame in enumerate(playback.frames[: playback.index + 1])
            for event in frame.events
        ]
        lines = [
            f"<b>{html.escape(playback.source.label(playback.episode))}</b> {badge}",
            f"{playback.index * dt:.2f} s &middot; step {playback.index} &middot; return {playback.total_reward:.4g}",
            *(f"<span style='color:#b35900'>{html.escape(remark)}</span>" for remark in remarks),
            *events[-MAX_EVENTS:],
        ]
        return "<div style='padding:0.4em 0.9em;line-height:1.6;font-size:0.9em'>" + "<br>".join(lines) + "</div>"


def _table(frames: Sequence[EpisodeFrame], key: str, lines: int) -> NDArray[np.float64]:
    """Entries `(lines, T)` of `key` in the frames, followed by the actions of the newest chunk in other lines."""
    chunk = frames[-1].chunk if key == ACTION and lines > MAX_LINES else None
    ahead = 0 if chunk is None else len(chunk)
    table = np.full((lines, len(frames) + ahead), np.nan)
    for column, frame in enumerate(frames):
        row = frame.vectors.get(key, np.zeros(0, np.float32))[:MAX_LINES]
        table[: len(row), column] = row
    if chunk is not None:
        rows = chunk.T[:MAX_LINES]
        table[MAX_LINES : MAX_LINES + len(rows), len(frames) :] = rows
    return table


def _camera_names(frame: EpisodeFrame) -> list[str]:
    """Names of the cameras of the model."""
    if not isinstance(frame.state, MujocoState):
        return []
    model = frame.state.model
    names = (mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_CAMERA, camera) for camera in range(model.ncam))
    return [name for name in names if name]
