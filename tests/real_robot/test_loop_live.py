"""Tests of the control loop and the policy thread in real time: rate, shutdown and no blocking calls."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from rig import DT, HORIZON, Embodiment, RobotSide, robot_spec

from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec
from robopolicy_robots.loop import ControlLoop, LoopOptions
from robopolicy_robots.policy_runner import InferenceResult, PolicyRunner
from robopolicy_robots.policy_source import SharedChunkPolicy
from robopolicy_robots.rate import gc_frozen, set_realtime_priority
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.loopback import LoopbackTransport

SPEC = PolicySpec({"state": (3,)}, action_dim=3, horizon=HORIZON, action_horizon=8)


class Source:
    """A policy that calls `act` and returns zeros."""

    spec, takes_prefix = SPEC, False

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        self.act, self.closed = act, threading.Event()

    def chunk(self, obs: Any, prefix: Any = None) -> Any:
        self.act()
        return np.zeros((HORIZON, 3), np.float32)

    def close(self) -> None:
        self.closed.set()


def answer_of(runner: PolicyRunner, seconds: float = 2.0) -> InferenceResult | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (answer := runner.poll()) is not None:
            return answer
        time.sleep(0.001)
    return None


def test_the_runner_does_not_block_the_caller() -> None:
    release = threading.Event()
    source = Source(lambda: release.wait(5.0))
    runner = PolicyRunner(source)
    start = time.monotonic()
    assert runner.request({}, 1.0) and runner.busy
    assert not runner.request({}, 2.0) and runner.poll() is None
    assert time.monotonic() - start < 0.2
    release.set()
    answer = answer_of(runner)
    assert answer is not None and answer.observed == 1.0 and answer.chunk is not None
    assert not runner.busy and runner.latency == 0.0 and runner.poll() is None  # the first call sets no latency
    assert runner.request({}, 2.0) and (answer := answer_of(runner)) is not None
    assert 0.0 < answer.seconds <= runner.latency < 1.0
    runner.close()
    assert source.closed.wait(1.0) and not runner.request({}, 3.0)


def test_calls_of_runners_that_share_a_policy_do_not_overlap() -> None:
    release, running = threading.Event(), list[int]()

    def act() -> None:
        running.append(len(running) + 1)
        release.wait(5.0)
        running.pop()

    source = Source(act)
    shared = SharedChunkPolicy(source)
    first, second = PolicyRunner(shared), PolicyRunner(shared)
    assert first.request({}, 0.0) and second.request({}, 0.0)
    time.sleep(0.1)
    assert len(running) == 1
    release.set()
    assert answer_of(first) is not None and answer_of(second) is not None
    for runner in (first, second):
        runner.close()
    assert not source.closed.is_set()


def test_policy_exceptions_are_returned_as_faults() -> None:
    def raising(error: Exception) -> Callable[[], None]:
        def act() -> None:
            raise error

        return act

    for act, fault, detail in (
        (raising(UserError("The server is gone.")), "unavailable", "The server is gone."),
        (raising(ZeroDivisionError("division")), "exception", "ZeroDivisionError: division"),
    ):
        runner = PolicyRunner(Source(act))
        runner.request({}, 0.0)
        answer = answer_of(runner)
        assert answer is not None and (answer.fault, answer.detail, answer.chunk) == (fault, detail, None)
        runner.close()


def test_closing_does_not_wait_for_a_hanging_policy() -> None:
    release = threading.Event()
    runner = PolicyRunner(Source(lambda: release.wait(10.0)))
    runner.request({}, 0.0)
    start = time.monotonic()
    runner.close()
    assert time.monotonic() - start < 1.0
    release.set()


class Live:
    """A control loop in real time, and a robot in a thread."""

    def __init__(
        self, domain: int, source: Source | None = None, on_tick: Callable[[Tick], None] | None = None
    ) -> None:
        spec = robot_spec(cameras=())
        self.robot, self.source = RobotSide(domain, spec), source or Source()
        self.ticks: list[Tick] = []
        parts = LoopOptions(on_tick=on_tick or self.ticks.append)
        self.loop = ControlLoop(spec, LoopbackTransport(domain), Embodiment(), PolicyRunner(self.source), parts)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        self.loop.arm()

    def _live(self) -> None:
        while not self._over.wait(DT / 2):
            self.robot.say(time.monotonic())
            self.robot.obey()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def test_the_loop_holds_its_rate_and_skips_missed_ticks() -> None:
    def slow(tick: Tick) -> None:
        live.ticks.append(tick)
        if len(live.ticks) == 40:
            time.sleep(5.5 * DT)

    with closing(Live(501)) as live:
        live.loop.options.on_tick = slow
        live.loop.run(seconds=1.5)
    assert live.loop.state is State.STOPPED and live.source.closed.wait(1.0)
    assert live.loop.overruns >= 4
    times = np.array([tick.now for tick in live.ticks])
    assert len(times) + live.loop.overruns == pytest.approx(1.5 / DT, abs=2)
    assert np.median(np.diff(times)) == pytest.approx(DT, rel=0.1)
    after = times[40:] - times[40]
    np.testing.assert_allclose(after[:20] / DT, np.round(after[:20] / DT), atol=0.9)  # on the original schedule again
    assert any(tick.state is State.RUN for tick in live.ticks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_in_the_safe_stop(number: int) -> None:
    asked: list[float] = []

    def ask(tick: Tick) -> None:
        if not asked and tick.state is State.RUN:
            asked.append(time.monotonic())
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with closing(Live(510 + number, on_tick=ask)) as live:
        live.loop.run(seconds=10.0)
        assert time.monotonic() - asked[0] < 3.0 and live.loop.state is State.STOPPED
    assert signal.getsignal(number) is before


def test_a_signal_presses_the_emergency_stop() -> None:
    """SIGUSR1 used to end the process without a safe stop."""
    pressed: list[float] = []
    states: list[State] = []

    def press(tick: Tick) -> None:
        if pressed:
            states.append(tick.state)
        if not pressed and tick.state is State.RUN:
            pressed.append(tick.now)
            os.kill(os.getpid(), signal.SIGUSR1)
        if tick.state is State.ESTOP and tick.now > pressed[0] + 1.0:
            live.loop.stop()

    before = signal.getsignal(signal.SIGUSR1)
    with closing(Live(520, on_tick=press)) as live:
        live.loop.run(seconds=10.0)
        assert states[0] is State.ESTOP and live.loop.estop.cause == "SIGUSR1"
        assert live.loop.state is State.STOPPED
    assert signal.getsignal(signal.SIGUSR1) is before


def test_another_thread_can_stop_the_loop_during_a_motion() -> None:
    with closing(Live(504, Source())) as live:
        live.source.chunk = lambda obs, prefix=None: np.sin(np.arange(HORIZON * 3.0)).reshape(HORIZON, 3)  # type: ignore[method-assign]
        running = threading.Thread(target=live.loop.run)
        running.start()
        time.sleep(0.8)
        state, start, ticks = live.loop.state, time.monotonic(), len(live.ticks)
        live.loop.stop()
        running.join(1.0)
    assert state is State.RUN
    assert not running.is_alive() and time.monotonic() - start < 3.0 and len(live.ticks) <= ticks + 1


def test_exceptions_end_in_the_safe_stop(caplog: pytest.LogCaptureFixture) -> None:
    def broken(tick: Tick) -> None:
        if tick.state is State.RUN:
            raise ValueError("a bug")

    with closing(Live(503, on_tick=broken)) as live, pytest.raises(ValueError, match="a bug"):
        live.loop.run(seconds=10.0)
    assert live.loop.state is State.STOPPED and "The control loop failed" in caplog.text


def test_unavailable_priorities_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="from 1 to 99, got 100"):
        set_realtime_priority(100)

    def refuse(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    with pytest.raises(UserError, match="Real-time priority 40 is not permitted here: run as root"):
        set_realtime_priority(40)


def test_gc_frozen_excludes_existing_objects() -> None:
    before = gc.get_freeze_count()
    with gc_frozen():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0 and gc.isenabled()
