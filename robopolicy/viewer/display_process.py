"""Process of a display: writes the frames that a program sends to a file, or shows them on a page."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco

from robopolicy.optional import require
from robopolicy.plurals import counted
from robopolicy.sim.physics_state import MujocoState
from robopolicy.viewer.frames import EpisodeFrame

if TYPE_CHECKING:
    from robopolicy.viewer.page import Page

LINGER = 30.0  # [s] for which the page of an ended program waits for a browser
NICENESS = 5  # the program comes first
READY, PAGE, FAILED, ENDED = "ready", "page", "failed", "ended"  # first words of the messages to the program

Message = tuple[str, float, EpisodeFrame]
"""Label of the episode, time in it [s], and frame."""


@dataclass(frozen=True)
class FrameStream:
    """What the frames of a program show; sent before the first one."""

    title: str
    control_dt: float  # [s] between two frames


def serve(link: Connection, path: Path | None, port: int) -> None:
    """Write the frames of `link` to the file `path`, or show them at `port`, until they end or the program ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the program, which then ends this process
    os.nice(NICENESS)
    try:
        answer = ENDED, _show(link, port) if path is None else _write(link, path)
    except Exception as error:  # whatever fails here must not stop the program, which shows the message
        answer = FAILED, str(error) or type(error).__name__
    with suppress(OSError):  # the program has ended
        link.send(answer)


def _receive(link: Connection) -> Iterator[Message]:
    """Yield the frames of the program; models of MuJoCo precede those that show them."""
    model: Any = None
    with suppress(OSError, EOFError):  # the program has ended
        while (received := link.recv()) is not None:
            if isinstance(received, mujoco.MjModel):
                model = received
                continue
            label, moment, frame = received
            if isinstance(frame.state, MujocoState):
                frame = replace(frame, state=replace(frame.state, model=model))
            yield label, moment, frame


def _write(link: Connection, path: Path) -> str:
    from robopolicy.viewer.sinks import FrameWriter, open_sink

    with open_sink(path) as sink:
        writer = FrameWriter(sink)
        link.send((READY, ""))
        if link.recv() is not None:  # the stream, unless the program ends without frames
            for message in _receive(link):
                writer.write(*message)
    return f"{path}, {counted(writer.count, 'frame')}"


def _show(link: Connection, port: int) -> str:
    """Show the page; after the last frame until no browser shows it."""
    from robopolicy.viewer.live import LiveEpisodes
    from robopolicy.viewer.page import Page, PageServer

    require("mjviser", "viewer")
    with closing(PageServer("robopolicy", port)) as server:
        link.send((READY, ""))
        stream = link.recv()
        if stream is None:  # the program has ended without a frame
            return ""
        link.send((PAGE, server.url))
        source = LiveEpisodes(stream.title, stream.control_dt)
        begun, ended = threading.Event(), threading.Event()

        def read() -> None:
            for label, _, frame in _receive(link):
                source.add(label, frame)
                begun.set()
            source.end()
            ended.set()
            begun.set()

        threading.Thread(target=read, name="frames", daemon=True).start()
        begun.wait()
        if source.newest < 0:
            return ""
        with closing(Page(server, source)) as page:
            page.run(_has_left(page, ended))
    return ""


def _has_left(page: Page, ended: threading.Event) -> Callable[[], bool]:
    """Return whether the program has ended, and the last browser has left or none has come for `LINGER` seconds."""
    visited, deadline = False, float("inf")

    def check() -> bool:
        nonlocal visited, deadline
        visited |= page.is_open
        if page.is_open or not ended.is_set():
            return False
        deadline = min(deadline, time.monotonic() + LINGER)
        return visited or time.monotonic() > deadline

    return check
