"""Watchdog of message ages, without synchronised clocks, and emergency stop.

Age of a stream = now - receipt + lateness, on the monotonic clock. The lateness of a message is its offset (receipt -
stamp) above the smallest offset of about the last minute. So the age does not depend on constant differences of the
clocks, but it includes delays of queued messages, and constant stamps become old.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from robopolicy.errors import UserError

WINDOW = 30.0  # [s] minimum offsets expire after one to two windows, so that clock drift does not matter
JUMP = 1.0  # [s] an offset smaller by this much than all before is a jump of the sender's clock
CONFIRMATIONS = 3  # consecutive messages that confirm a jump of the clock


@dataclass
class MessageTiming:
    """Arrival times of one kind of message."""

    deadline: float  # [s] maximum age
    sequence: int = -1
    received: float = -math.inf  # [s] receipt of the newest message in order
    stamp: float = -math.inf  # [s] stamp of that message
    lateness: float = 0.0  # [s] lateness of that message
    out_of_order: int = 0  # messages ignored because of their stamps
    jumps: int = 0  # jumps of the sender's clock
    _usable: bool = True  # whether the last message was in order
    _min_offsets: tuple[float, float] = (math.inf, math.inf)  # [s] minimum offsets of the last and the current window
    _window_end: float = math.inf
    _odd: list[float] = field(default_factory=list)  # consecutive stamps that differ from the earlier ones

    def update(self, received: float, stamp: float | None, sequence: int) -> bool:
        """Record the newest message; return False if its stamp is out of order, so that it must not be used."""
        if sequence == self.sequence:
            return self._usable
        self.sequence = sequence
        self._usable = self._check(received, stamp)
        return self._usable

    def age(self, now: float) -> float:
        """Age of the newest message in order [s]; inf before the first."""
        return now - self.received + self.lateness

    def _check(self, received: float, stamp: float | None) -> bool:
        if stamp is None or not math.isfinite(stamp):
            self.received, self.lateness = received, 0.0
            return True
        offset = received - stamp
        if stamp < self.stamp or offset < min(self._min_offsets) - JUMP < math.inf:
            if not self._jumped(stamp):
                self.out_of_order += 1
                return False
            self.jumps += 1
            self._min_offsets = (math.inf, math.inf)
        self._odd.clear()
        self._update_offsets(offset, received)
        self.received, self.stamp, self.lateness = received, stamp, offset - min(self._min_offsets)
        return True

    def _jumped(self, stamp: float) -> bool:
        """Whether enough consecutive messages confirm another clock, not only a damaged or reordered message."""
        if self._odd and not 0.0 < stamp - self._odd[-1] < JUMP:
            self._odd.clear()
        self._odd.append(stamp)
        return len(self._odd) >= CONFIRMATIONS

    def _update_offsets(self, offset: float, received: float) -> None:
        if received >= self._window_end or not math.isfinite(self._window_end):
            self._min_offsets = (self._min_offsets[1], math.inf)
            self._window_end = received + WINDOW
        self._min_offsets = (self._min_offsets[0], min(self._min_offsets[1], offset))


class Watchdog:
    """Ages of all streams, compared with their deadlines.

    Args:
        deadlines: Maximum ages `{stream: [s]}`.
    """

    def __init__(self, deadlines: Mapping[str, float]) -> None:
        if not all(deadline > 0 for deadline in deadlines.values()):
            raise UserError(f"Every deadline of the watchdog must be positive, got {dict(deadlines)}.")
        self.streams = {name: MessageTiming(deadline) for name, deadline in deadlines.items()}

    def update(self, name: str, received: float, stamp: float | None, sequence: int) -> bool:
        """Record the newest message of a stream; return False if it is out of order and must not be used."""
        return self.streams[name].update(received, stamp, sequence)

    def oldest(self, now: float) -> tuple[str, float, float] | None:
        """Name, age [s] and deadline [s] of the stream farthest beyond its deadline; None if all are fresh."""
        late = [(name, stream.age(now), stream.deadline) for name, stream in self.streams.items()]
        late = [row for row in late if not row[1] <= row[2]]
        return max(late, key=lambda row: row[1] - row[2], default=None)

    def reset(self) -> None:
        """Clear all streams, e.g. after a change of publisher."""
        self.streams = {name: MessageTiming(stream.deadline) for name, stream in self.streams.items()}


log = logging.getLogger(__name__)


class EStop:
    """Emergency stop: a latch with several sources.

    Args:
        heartbeat: Timeout [s] of the operator's heartbeat, after the first one; 0 for none.
    """

    def __init__(self, heartbeat: float = 0.0) -> None:
        self.cause = ""  # first source that pressed it; empty if released
        self._heartbeat, self._beat = heartbeat, float("nan")
        self._pressed: set[str] = set()  # sources that are pressed

    def __bool__(self) -> bool:
        return bool(self.cause)

    def press(self, source: str) -> None:
        """Press the emergency stop; safe in any thread or signal handler."""
        if not self.cause:
            self.cause = source
            log.error("Emergency stop: %s", source)

    def set_level(self, source: str, pressed: bool) -> None:
        """Update the state of a continuous source, such as a topic or a button."""
        if pressed:
            self._pressed.add(source)
            self.press(source)
        else:
            self._pressed.discard(source)

    def heartbeat(self, now: float) -> None:
        """Record a heartbeat of the operator at `now` [s]."""
        self._beat = now

    @property
    def heartbeat_ok(self) -> bool:
        """Whether a heartbeat arrived since the last reset, or none is required."""
        return not self._heartbeat or not math.isnan(self._beat)

    def check(self, now: float) -> bool:
        """Check the heartbeat at `now` [s]; return whether the emergency stop is pressed."""
        if self._heartbeat and now - self._beat > self._heartbeat:  # False before the first heartbeat, which is NaN
            self.press(f"no heartbeat for {now - self._beat:.2f} s")
        return bool(self.cause)

    def reset(self) -> None:
        """Release the emergency stop; raises `UserError` if a source is still pressed."""
        if self._pressed:
            raise UserError(f"The emergency stop cannot be reset while {', '.join(sorted(self._pressed))} is pressed.")
        if self.cause:
            log.warning("Emergency stop reset by the operator; it was pressed by: %s", self.cause)
        self.cause, self._beat = "", float("nan")

    @contextmanager
    def on_signal(self, number: int = signal.SIGUSR1) -> Iterator[None]:
        """Press the emergency stop on a signal; has no effect outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def pressed(number: int, _: Any) -> None:
            self.press(signal.Signals(number).name)

        before = signal.signal(number, pressed)
        try:
            yield
        finally:
            signal.signal(number, before)
