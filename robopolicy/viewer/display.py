"""Display of a running program: another process writes its frames to a file, or shows them on a page.

The program never waits: frames are queued, a thread sends them, and frames that find the queue full are dropped and
counted. If the process fails, the program continues without it.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, cast

from robopolicy.errors import UserError
from robopolicy.sim.physics_state import MujocoState
from robopolicy.viewer.display_process import ENDED, FAILED, PAGE, READY, FrameStream, Message, serve
from robopolicy.viewer.frames import EpisodeFrame

log = logging.getLogger(__name__)
MAX_QUEUED = 200  # frames that wait for the process
START_TIMEOUT = 60.0  # [s] until the process is ready
END_TIMEOUT = 30.0  # [s] for the frames that are queued at the end


class Display:
    """Queue, threads and process of one display; a context manager that completes the file or waits for the browser.

    Args:
        path: `.mcap` or `.rrd` file to write; None shows a page.
        port: Port of the page on 127.0.0.1; 0 is a free one.

    Raises:
        UserError: The file or the page cannot be opened, or a package is missing.
    """

    def __init__(self, path: Path | None, port: int = 0) -> None:
        self.dropped = 0  # frames that found the queue full
        self._path = path
        self._failed = self._left = False  # the process has failed; the page is not waited for
        self._queue: queue.Queue[FrameStream | Message | None] = queue.Queue(MAX_QUEUED)
        context = get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, path, port), name="display", daemon=True)
        self._process.start()
        theirs.close()
        kind, text = FAILED, "The process of the display did not start; see its message above."
        with suppress(EOFError):
            kind, text = self._link.recv() if self._link.poll(START_TIMEOUT) else (kind, text)
        if kind != READY:
            self._process.kill()
            raise UserError(text)
        works = self._send, self._listen
        self._threads = [threading.Thread(target=work, name="display", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def begin(self, stream: FrameStream) -> None:
        """Describe the frames; called once, before the first one."""
        self._queue.put(stream)

    def add(self, label: str, time: float, frame: EpisodeFrame) -> None:
        """Queue a frame at `time` [s] of the episode `label`, without waiting."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((label, time, frame))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Complete the file, or keep the page until its last browser leaves; safe to call twice."""
        sender, listener = self._threads
        if sender.is_alive():
            with suppress(queue.Full):
                self._queue.put(None, timeout=END_TIMEOUT)
            sender.join(END_TIMEOUT)
        shows = self._path is None and not (self._left or sender.is_alive())
        try:
            self._process.join(None if shows else END_TIMEOUT)
        except KeyboardInterrupt:
            self._left = True
        self._process.kill()  # which has ended, unless it hangs or the user has left the page
        listener.join()
        self._process.join()
        self._link.close()
        if self.dropped:
            log.warning("The display lacks %d frames, which came faster than it takes them.", self.dropped)
            self.dropped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._left = kind is not None  # a stopped program does not wait for its page
        self.close()

    def _send(self) -> None:
        """Send the queued frames; a model is sent once."""
        model: Any = None
        with suppress(OSError):  # of a process that has ended, which `_listen` reports
            while (message := self._queue.get()) is not None:
                if isinstance(message, FrameStream):
                    self._link.send(message)
                    continue
                label, moment, frame = message
                if isinstance(frame.state, MujocoState):
                    if frame.state.model is not model:
                        model = frame.state.model
                        self._link.send(model)
                    frame = replace(frame, state=replace(frame.state, model=cast(Any, None)))
                self._link.send((label, moment, frame))
            self._link.send(None)

    def _listen(self) -> None:
        """Report the address of the page, and once that the display has failed."""
        kind = text = ""
        with suppress(OSError, EOFError):
            while kind not in (FAILED, ENDED):
                kind, text = self._link.recv()
                if kind in (PAGE, ENDED) and text:
                    print(f"display: {text}", file=sys.stderr, flush=True)  # noqa: T201
        self._failed = kind != ENDED and not self._left
        if self._failed:
            text = text if kind == FAILED else "its process has ended"
            log.warning("The display has failed, and the program continues without it: %s", text)
