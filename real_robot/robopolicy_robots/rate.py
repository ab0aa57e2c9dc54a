"""Ticks at a fixed rate on the monotonic clock, real-time priority, and signals that end a loop."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from robopolicy.errors import UserError
from robopolicy.shutdown import detach_terminal, stop_signals


def ticks(dt: float, stopping: threading.Event, seconds: float) -> Iterator[tuple[float, int]]:
    """Yield a tick every `dt` seconds for `seconds`, until `stopping` is set: due time and number of missed ticks.

    Deadlines are absolute, so late ticks do not shift later ones, and missed ticks are skipped.
    """
    start = due = time.monotonic()
    missed = 0
    while not stopping.is_set() and due - start < seconds:
        yield due, missed
        due += dt
        missed = int(max(0.0, time.monotonic() - due) / dt)
        due += missed * dt
        stopping.wait(max(0.0, due - time.monotonic()))


@contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` on `stop_signals`; has no effect outside of the main thread."""
    before: dict[int, Any] = {}

    def stop(number: int, _: FrameType | None) -> None:
        detach_terminal(number)
        stopping.set()

    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_realtime_priority(level: int) -> None:
    """Set real-time priority (SCHED_FIFO) for this thread and all threads and processes that it starts later.

    Call it before the transport and the policy start threads: otherwise the loop waits for threads of low priority to
    release the interpreter.

    Args:
        level: Priority from 1 to 99; kernel threads have 50.

    Raises:
        UserError: The system does not permit it, or has no real-time priorities.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(level))
    except AttributeError as error:
        raise UserError("This system has no real-time priorities; leave --priority out.") from error
    except OSError as error:
        if not 1 <= level <= 99:
            raise UserError(f"A real-time priority is a number from 1 to 99, got {level}.") from error
        raise UserError(
            f"Real-time priority {level} is not permitted here: run as root or with CAP_SYS_NICE, or allow it by "
            "'rtprio' in /etc/security/limits.conf or LimitRTPRIO= of a systemd unit; or leave --priority out."
        ) from error


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would delay the loop by many ticks."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
