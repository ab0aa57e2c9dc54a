"""The signals that ask a program to end, of which one says that nobody listens any more."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and the SIGHUP of a terminal that is gone unless it is ignored, as under nohup."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hangup


def hear(number: int) -> None:
    """For handlers of `stop_signals`: after SIGHUP, what would go to the terminal goes nowhere, without error."""
    if number != getattr(signal, "SIGHUP", None):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def on_stop_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask` with the number of each of `stop_signals`, in the main thread, which alone receives them."""

    def handler(number: int, frame: FrameType | None) -> None:
        hear(number)
        ask(number)

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
