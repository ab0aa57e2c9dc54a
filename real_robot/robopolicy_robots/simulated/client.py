"""The other end of a simulated robot's own topics: start it, start its episodes, make it fail, keep time with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from robopolicy.errors import UserError
from robopolicy_robots.messages import String
from robopolicy_robots.simulated.topics import EPISODE, FAULT, LOCKSTEP_ORIGIN, READY, RESET, Reset, Status
from robopolicy_robots.transports.base import COMMAND, LATCHED, Arrival, M, QoS, Subscription, Transport
from robopolicy_robots.transports.wrapped import WrappedSubscription, WrappedTransport

NODE = "robopolicy_robots.simulated.node"  # module that is the process
PATIENCE = 30.0  # [s] for a process to start and answer; importing MuJoCo takes a few on a busy machine
_POLL = 5e-5  # [s]
AGAIN = 0.5  # [s] after which a reset that was not answered is asked for again


class Simulation:
    """Asks a simulated robot for episodes."""

    def __init__(self, transport: Transport) -> None:
        self._reset = transport.advertise(RESET, String, COMMAND)
        self._fault = transport.advertise(FAULT, String, COMMAND)
        self._episode = transport.subscribe(EPISODE, String, LATCHED)
        self._request = time.time_ns() % 2**31  # so that a controller that is started again is another asker

    @property
    def status(self) -> Status:
        """How the episode stands."""
        received = self._episode.latest()
        return Status() if received is None else Status.read(received.message)

    def reset(self, seed: int) -> None:
        """Start episode `seed` and wait until the robot says so.

        Raises:
            UserError: There is no answer.
        """
        self._request += 1
        asked, until = -AGAIN, time.monotonic() + PATIENCE
        while self.status.request != self._request:
            now = time.monotonic()
            if now > until:
                raise UserError(f"No simulated robot answers on {RESET}; start 'python -m {NODE}' first.")
            if now - asked > AGAIN and self._reset.matched:
                self._reset.publish(Reset(seed, self._request).message())
                asked = now
            time.sleep(_POLL)

    def fail(self, fault: str) -> None:
        """Make the robot fail, see `robopolicy_robots.simulated.node`."""
        self._fault.publish(String(fault))


@contextmanager
def simulated(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A simulated robot in a process of its own, `arguments` being those of its node; ended on leaving.

    Raises:
        UserError: It does not start; with what it says.
    """
    command = [sys.executable, "-m", NODE, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise UserError(f"The simulated robot did not start (exit code {process.wait()}); see its message above.")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


class SimulatedTime(WrappedTransport):
    """Another transport, whose messages arrive in simulated time: a robot in lockstep keeps the clock.

    `now` moves on with `catch_up`, which waits until every sensor has reported the state after a command.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.now = 0.0  # [s] simulated
        self._timed: list[_TimedSubscription[Any]] = []

    def catch_up(self, until: float, patience: float = PATIENCE) -> None:
        """Wait until all that was reported is from `until` [s simulated] or later, and let it be that time.

        Raises:
            UserError: The robot does not get there.
        """
        deadline = time.monotonic() + patience
        while any(subscription.behind(until) for subscription in self._timed):
            if time.monotonic() > deadline:
                raise UserError(f"The simulated robot stays behind {until:.3f} s; it waits for a command, or has died.")
            time.sleep(_POLL)
        self.now = until

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        subscription = _TimedSubscription(self._inner.subscribe(topic, kind, qos), self)
        self._timed.append(subscription)
        return subscription


class _TimedSubscription(WrappedSubscription[M]):
    """Messages arrive when they are first asked for."""

    def __init__(self, inner: Subscription[M], clock: SimulatedTime) -> None:
        super().__init__(inner)
        self._clock = clock

    def behind(self, until: float) -> bool:
        """Whether it reports with stamps, and nothing as late as `until` [s simulated] yet."""
        received = self._inner.latest()
        if received is None or received.stamp is None:
            return False
        return received.stamp < LOCKSTEP_ORIGIN + until - 1e-6

    def _arrived(self) -> list[Arrival]:
        return [replace(arrival, received=self._clock.now) for arrival in super()._arrived()]
