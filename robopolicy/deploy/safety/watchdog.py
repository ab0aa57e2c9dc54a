"""Watchdog of message ages, without synchronised clocks, and emergency stop.

Age of a stream = now - time of receipt + lateness, on our monotonic clock. Lateness is the delay beyond the usual of
the newest message after its stamp: its offset (receipt - stamp) above the smallest offset of the last minute or
so. A constant difference of the clocks cancels, a backlog of messages does not, and constant stamps grow old.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from robopolicy.errors import UserError

WINDOW = 30.0  # [s] minimum offsets expire after one to two windows, so that clock drift does not matter
JUMP = 1.0  # [s] a stamp this much earlier after its receipt than ever before belongs to a clock that jumped ahead
CONFIRMATIONS = 3  # consecutive messages that confirm a jump of the clock


@dataclass
class MessageTiming:
    """Arrival times of one kind of message."""

    deadline: float  # [s] largest age that is fresh
    sequence: int = -1
    received: float = -math.inf  # [s] of the newest message in order
    stamp: float = -math.inf  # [s] of the same
    lateness: float = 0.0  # [s] of the same
    out_of_order: int = 0  # messages ignored because of their stamps
    jumps: int = 0  # of the sender's clock
    _usable: bool = True  # the message of `sequence`
    _least: tuple[float, float] = (math.inf, math.inf)  # offsets [s] of the window before and of this one
    _window_end: float = math.inf
    _odd: list[float] = field(default_factory=list)  # consecutive stamps that differ from the earlier ones

    def update(self, received: float, stamp: float | None, sequence: int) -> bool:
        """Record the newest message; False if its stamp is out of order and it must not be used."""
        if sequence == self.sequence:
            return self._usable
        self.sequence = sequence
        self._usable = self._judge(received, stamp)
        return self._usable

    def age(self, now: float) -> float:
        """Age of the newest message in order [s]; inf before the first."""
        return now - self.received + self.lateness

    def _judge(self, received: float, stamp: float | None) -> bool:
        if stamp is None or not math.isfinite(stamp):
            self.received, self.lateness = received, 0.0
            return True
        offset = received - stamp
        if stamp < self.stamp or offset < min(self._least) - JUMP < math.inf:
            if not self._jumped(stamp):
                self.out_of_order += 1
                return False
            self.jumps += 1
            self._least = (math.inf, math.inf)
        self._odd.clear()
        self._remember(offset, received)
        self.received, self.stamp, self.lateness = received, stamp, offset - min(self._least)
        return True

    def _jumped(self, stamp: float) -> bool:
        """Whether enough consecutive messages show another clock; a single one was damaged or reordered."""
        if self._odd and not 0.0 < stamp - self._odd[-1] < JUMP:
            self._odd.clear()
        self._odd.append(stamp)
        return len(self._odd) >= CONFIRMATIONS

    def _remember(self, offset: float, received: float) -> None:
        if received >= self._window_end or not math.isfinite(self._window_end):
            self._least = (self._least[1], math.inf)
            self._window_end = received + WINDOW
        self._least = (self._least[0], min(self._least[1], offset))


class Watchdog:
    """Ages of all streams, compared with their deadlines.

    Args:
        deadlines: {stream: largest age [s] that is fresh}.
    """

    def __init__(self, deadlines: Mapping[str, float]) -> None:
        if not all(deadline > 0 for deadline in deadlines.values()):
            raise UserError(f"Every deadline of the watchdog must be positive, got {dict(deadlines)}.")
        self.streams = {name: MessageTiming(deadline) for name, deadline in deadlines.items()}

    def update(self, name: str, received: float, stamp: float | None, sequence: int) -> bool:
        """Record the newest message of a stream; False if its stamp is out of order and it must not be used."""
        return self.streams[name].update(received, stamp, sequence)

    def oldest(self, now: float) -> tuple[str, float, float] | None:
        """The stream furthest beyond its deadline: name, age [s] and deadline [s]; None if all are fresh."""
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
        heartbeat: Timeout [s] of the heartbeat of an operator, after the first one; 0 for none.
    """

    def __init__(self, heartbeat: float = 0.0) -> None:
        self.cause = ""  # source that pressed it; empty while released
        self._heartbeat, self._beat = heartbeat, float("nan")
        self._held: set[str] = set()  # sources that are pressed now

    def __bool__(self) -> bool:
        return bool(self.cause)

    def press(self, source: str) -> None:
        """Stop, from any thread or signal handler."""
        if not self.cause:
            self.cause = source
            log.error("Emergency stop: %s", source)

    def set_level(self, source: str, pressed: bool) -> None:
        """Update the state of a continuous source, such as a topic or a button."""
        if pressed:
            self._held.add(source)
            self.press(source)
        else:
            self._held.discard(source)

    def heartbeat(self, now: float) -> None:
        """Record a heartbeat of the operator at `now` [s]."""
        self._beat = now

    @property
    def heartbeat_ok(self) -> bool:
        """Whether a heartbeat arrived since the last reset, or none is required."""
        return not self._heartbeat or not math.isnan(self._beat)

    def check(self, now: float) -> bool:
        """Whether it is pressed at `now` [s], also by a missing heartbeat."""
        if self._heartbeat and now - self._beat > self._heartbeat:  # never before the first beat: NaN compares false
            self.press(f"no heartbeat for {now - self._beat:.2f} s")
        return bool(self.cause)

    def reset(self) -> None:
        """Release it, as an operator.

        Raises:
            UserError: A source is still pressed.
        """
        if self._held:
            raise UserError(f"The emergency stop cannot be reset while {', '.join(sorted(self._held))} is pressed.")
        if self.cause:
            log.warning("Emergency stop reset by the operator; it was pressed by: %s", self.cause)
        self.cause, self._beat = "", float("nan")

    def listen(self, number: int = signal.SIGUSR1) -> None:
        """Press it on a signal (in the main thread)."""

        def pressed(number: int, _: Any) -> None:
            self.press(signal.Signals(number).name)

        signal.signal(number, pressed)
