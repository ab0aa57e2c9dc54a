"""The emergency stop of the software: once pressed it stays pressed until an operator resets it.

It is no replacement for the button that cuts the power: if this process or its computer dies, it does nothing.
"""

from __future__ import annotations

import logging
import math
import signal
from typing import Any

from robopolicy.errors import UserError

log = logging.getLogger(__name__)


class EStop:
    """A latch with several sources.

    Args:
        heartbeat: Seconds within which an operator's heartbeat has to be heard, once the first was; 0 for none.
    """

    def __init__(self, heartbeat: float = 0.0) -> None:
        self.cause = ""  # what pressed it; empty while it is not pressed
        self._heartbeat, self._beat = heartbeat, float("nan")
        self._held: set[str] = set()  # sources that are pressed at this moment

    def __bool__(self) -> bool:
        return bool(self.cause)

    def press(self, source: str) -> None:
        """Stop, from any thread or signal handler."""
        if not self.cause:
            self.cause = source
            log.error("Emergency stop: %s", source)

    def level(self, source: str, pressed: bool) -> None:
        """A source that says continuously whether it is pressed, such as a topic or a button."""
        if pressed:
            self._held.add(source)
            self.press(source)
        else:
            self._held.discard(source)

    def beat(self, now: float) -> None:
        """An operator's heartbeat arrived at `now` [s]."""
        self._beat = now

    @property
    def attended(self) -> bool:
        """Whether an operator was heard of since the last reset, or none has to be."""
        return not self._heartbeat or not math.isnan(self._beat)

    def check(self, now: float) -> bool:
        """Whether it is pressed at `now` [s], be it by silence."""
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
        """Let a signal press it (in the main thread)."""

        def pressed(number: int, _: Any) -> None:
            self.press(signal.Signals(number).name)

        signal.signal(number, pressed)
