"""Client of a simulated robot: start the process, start episodes, inject faults, run in lockstep."""

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

NODE = "robopolicy_robots.simulated.node"  # module of the process
START_TIMEOUT = 30.0  # [s] maximum time until a process starts and responds
_POLL = 5e-5  # [s] polling interval
RESET_RETRY = 0.5  # [s] after which an unconfirmed reset is repeated


class Simulation:
    """Client of the topics of a simulated robot."""

    def __init__(self, transport: Transport) -> None:
        self._reset = transport.advertise(RESET, String, COMMAND)
        self._fault = transport.advertise(FAULT, String, COMMAND)
        self._episode = transport.subscribe(EPISODE, String, LATCHED)
        self._request = time.time_ns() % 2**31  # a restarted client has other request numbers

    @property
    def status(self) -> Status:
        """Status of the current episode."""
        received = self._episode.latest()
        return Status() if received is None else Status.read(received.message)

    def reset(self, seed: int) -> None:
        """Start episode `seed` and wait for confirmation; raises `UserError` after `START_TIMEOUT`."""
        self._request += 1
        requested, until = -RESET_RETRY, time.monotonic() + START_TIMEOUT
        while self.status.request != self._request:
            now = time.monotonic()
            if now > until:
                raise UserError(f"No simulated robot responds on {RESET}; start 'python -m {NODE}' first.")
            if now - requested > RESET_RETRY and self._reset.matched:
                self._reset.publish(Reset(seed, self._request).message())
                requested = now
            time.sleep(_POLL)

    def inject_fault(self, fault: str) -> None:
        """Inject a fault (see `robopolicy_robots.simulated.topics`)."""
        self._fault.publish(String(fault))


@contextmanager
def simulated(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a node in its own process until the context ends; raises `UserError` if it does not start."""
    command = [sys.executable, "-m", NODE, "--attached", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
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
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class SimulatedTime(WrappedTransport):
    """Transport wrapper with simulated arrival times, for a robot in lockstep; `catch_up` advances `now`."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.now = 0.0  # [s] simulated
        self._timed: list[_TimedSubscription[Any]] = []

    def catch_up(self, until: float, timeout: float = START_TIMEOUT) -> None:
        """Wait until all sensors have reported the state at `until` [s simulated]; raises `UserError` on timeout."""
        deadline = time.monotonic() + timeout
        while any(subscription.behind(until) for subscription in self._timed):
            if time.monotonic() > deadline:
                raise UserError(f"The simulated robot did not reach {until:.3f} s; it got no command, or has ended.")
            time.sleep(_POLL)
        self.now = until

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        subscription = _TimedSubscription(self._inner.subscribe(topic, kind, qos), self)
        self._timed.append(subscription)
        return subscription


class _TimedSubscription(WrappedSubscription[M]):
    """Subscription with the simulated time of the first read as arrival time."""

    def __init__(self, inner: Subscription[M], clock: SimulatedTime) -> None:
        super().__init__(inner)
        self._clock = clock

    def behind(self, until: float) -> bool:
        """Whether the newest stamp is before `until` [s simulated]; False for messages without stamps."""
        received = self._inner.latest()
        if received is None or received.stamp is None:
            return False
        return received.stamp < LOCKSTEP_ORIGIN + until - 1e-6

    def _arrived(self) -> list[Arrival]:
        return [replace(arrival, received=self._clock.now) for arrival in super()._arrived()]
