"""A steady beat on the monotonic clock, and signals that end it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def beats(dt: float, stopping: threading.Event, seconds: float) -> Iterator[int]:
    """Give a beat every `dt` seconds for `seconds`, until `stopping` is set: how many were missed before it.

    Deadlines are absolute, so late beats do not shift the later ones, and missed ones are skipped, never made up for.
    """
    start = due = time.monotonic()
    missed = 0
    while not stopping.is_set() and due - start < seconds:
        yield missed
        due += dt
        missed = int(max(0.0, time.monotonic() - due) / dt)
        due += missed * dt
        stopping.wait(max(0.0, due - time.monotonic()))


@contextmanager
def ended_by_signals(stopping: threading.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set `stopping`; only the main thread of a program can."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *_: stopping.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
