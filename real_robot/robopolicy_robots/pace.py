"""A steady beat on the monotonic clock, what keeps it steady, and signals that end it."""

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
from robopolicy.shutdown import hear, stop_signals


def beats(dt: float, stopping: threading.Event, seconds: float) -> Iterator[tuple[float, int]]:
    """Give a beat every `dt` seconds for `seconds`, until `stopping` is set: when it was due, how many were missed.

    Deadlines are absolute, so late beats do not shift the later ones, and missed ones are skipped, never made up for.
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
def ended_by_signals(stopping: threading.Event) -> Iterator[None]:
    """Let `stop_signals` set `stopping`; only the main thread of a program can."""
    before: dict[int, Any] = {}

    def stop(number: int, _: FrameType | None) -> None:
        hear(number)
        stopping.set()

    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prioritise(level: int) -> None:
    """Let this thread, and all threads and processes that it starts later, go before everything ordinary (SCHED_FIFO).

    Call it before the transport and the policy have threads: a loop that goes first and then waits for one of theirs to
    let go of the interpreter is no faster.

    Args:
        level: From 1 to 99, higher goes first; the kernel's own threads have 50.

    Raises:
        UserError: The system does not permit it, or knows no such priorities.
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
def unswept() -> Iterator[None]:
    """Let the garbage collector pass over all that exists already; sweeping it would stop the loop for many ticks."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
