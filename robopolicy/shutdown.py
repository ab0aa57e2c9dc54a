"""Handling of the signals that end a program: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


class Interrupted(Exception):
    """A signal stopped the run; its resume point has been saved."""

    def __init__(self, signum: int, folder: Path) -> None:
        super().__init__(signum, folder)  # its arguments, so that it can be pickled between processes
        self.exit_code, self.folder = 128 + signum, folder

    def __str__(self) -> str:
        return f"Stopped; resume with: robopolicy train --resume {self.folder}"


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hangup


def detach_terminal(number: int) -> None:
    """Discard terminal output after SIGHUP, for handlers of `stop_signals`."""
    if number != getattr(signal, "SIGHUP", None):
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(devnull, stream)
    os.close(devnull)


@contextmanager
def handle_shutdown(callback: Callable[[int], None]) -> Iterator[None]:
    """Call `callback` with the number of each signal of `stop_signals`; only the main thread receives signals."""

    def handler(number: int, frame: FrameType | None) -> None:
        detach_terminal(number)
        callback(number)

    try:
        previous = {number: signal.signal(number, handler) for number in stop_signals()}
    except ValueError:  # another thread
        yield
        return
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
