"""Tests of the state machines of the safety layer: watchdog, observation gate, emergency stop, fall-back, log."""

import logging
import os
import signal

import numpy as np
import pytest

from robopolicy.deploy.safety.interventions import InterventionLog, SafetyIntervention
from robopolicy.deploy.safety.motion import JointLimits, go_home, hold
from robopolicy.deploy.safety.ood import ObservationGate, ObservationGateConfig, ObservationRange
from robopolicy.deploy.safety.watchdog import CONFIRMATIONS, WINDOW, EStop, MessageTiming, Watchdog
from robopolicy.errors import UserError

EPOCH = 1.7e9


def feed(
    stream: MessageTiming, start: float, stop: float, skew: float = 0.0, delay: float = 0.001, dt: float = 0.01
) -> float:
    """Send messages every `dt` from `start` to `stop`, stamped by a clock `skew` ahead; return the last time."""
    times = np.arange(start, stop, dt)
    for time in times:
        stream.update(time + delay, EPOCH + time + skew, stream.sequence + 1)
    return float(times[-1])


@pytest.mark.parametrize("skew", [0.0, 10.0, -10.0, -EPOCH + 5.0])
def test_age_does_not_depend_on_the_clock_offset(skew: float) -> None:
    stream = MessageTiming(0.1)
    assert stream.age(0.0) == np.inf
    last = feed(stream, 5.0, 6.0, skew)
    assert stream.age(last + 0.05) == pytest.approx(0.049, abs=1e-5)


def test_messages_of_a_backlog_are_old() -> None:
    stream = MessageTiming(0.1)
    feed(stream, 0.0, 1.0)
    last = feed(stream, 1.0, 2.0, delay=0.371)
    assert stream.age(last + 0.371) == pytest.approx(0.37, abs=1e-5)
    last = feed(stream, 2.5, 3.0)  # fresh again without the backlog
    assert stream.age(last + 0.001) == pytest.approx(0.0, abs=1e-5)


def test_messages_with_frozen_stamps_are_old() -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 1.0)
    for time in np.arange(1.0, 1.5, 0.01):
        stream.update(time, EPOCH + last, stream.sequence + 1)
    assert stream.age(1.49) == pytest.approx(0.499, abs=1e-3)


def test_messages_out_of_order_are_ignored() -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 1.0)
    assert not stream.update(last + 0.002, EPOCH + last - 0.05, stream.sequence + 1)
    assert not stream.update(last + 0.002, EPOCH + last - 0.05, stream.sequence)  # the same message, polled again
    assert stream.out_of_order == 1 and stream.received == last + 0.001
    assert stream.update(last + 0.01, EPOCH + last + 0.009, stream.sequence + 1)


@pytest.mark.parametrize("jump", [10.0, -10.0, -0.5])
def test_clock_jump_is_accepted_after_a_few_messages(jump: float) -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 2.0)
    oldest = 0.0
    for time in np.arange(last + 0.01, 4.0, 0.01):
        stream.update(time + 0.001, EPOCH + time + jump, stream.sequence + 1)
        oldest = max(oldest, stream.age(time + 0.001))
    assert stream.jumps == 1 and stream.out_of_order == CONFIRMATIONS - 1
    assert oldest < 0.05  # never stale


def test_single_stamp_from_the_future_is_ignored() -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 1.0)
    assert not stream.update(last + 0.005, EPOCH + last + 1000.0, stream.sequence + 1)
    last = feed(stream, 1.0, 2.0)
    assert stream.age(last + 0.001) == pytest.approx(0.0, abs=1e-5) and stream.jumps == 0


def test_clock_drift_is_tolerated() -> None:
    stream = MessageTiming(0.1)
    for time in np.arange(0.0, 100 * WINDOW, 0.5):  # 50 ppm slow: 75 ms late by the end
        stream.update(time, EPOCH + time * (1.0 - 5e-5), stream.sequence + 1)
        assert stream.age(time) < 2 * WINDOW * 5e-5 + 1e-6


def test_messages_without_a_stamp_are_aged_by_their_arrival() -> None:
    stream = MessageTiming(0.1)
    assert stream.update(1.0, None, 1) and stream.update(1.0, None, 1)  # the same message again
    assert stream.age(1.5) == 0.5


@pytest.mark.parametrize("stamp", [None, float("nan"), float("inf")])
def test_a_message_without_a_stamp_is_no_older_than_its_arrival(stamp: float | None) -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 1.0)
    stream.update(last + 0.31, EPOCH + last + 0.01, stream.sequence + 1)  # 0.3 s late
    assert stream.age(last + 0.31) == pytest.approx(0.299, abs=1e-5)
    assert stream.update(last + 0.32, stamp, stream.sequence + 1)
    assert stream.age(last + 0.37) == pytest.approx(0.05, abs=1e-9)


def test_isolated_wrong_stamps_are_not_a_clock_jump() -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 1.0)
    for number in range(3 * CONFIRMATIONS):
        assert not stream.update(last + 0.005, EPOCH + last - 0.5, stream.sequence + 1)
        last = feed(stream, 1.0 + 0.1 * number, 1.0 + 0.1 * number + 0.015)
    assert stream.jumps == 0 and stream.out_of_order == 3 * CONFIRMATIONS


def test_repeated_old_stamp_is_not_a_clock_jump() -> None:
    stream = MessageTiming(0.1)
    last = feed(stream, 0.0, 1.0)
    for number in range(3 * CONFIRMATIONS):
        assert not stream.update(last + 0.01 * number, EPOCH + last - 0.5, stream.sequence + 1)
    assert stream.jumps == 0 and stream.age(last + 0.2) == pytest.approx(0.199, abs=1e-5)


def test_watchdog_ranks_streams_by_the_time_beyond_their_deadline() -> None:
    watchdog = Watchdog({"joints": 0.1, "image.front": 0.25})
    watchdog.update("joints", 1.05, None, 1)
    watchdog.update("image.front", 1.0, None, 1)
    assert watchdog.oldest(1.35) == ("joints", pytest.approx(0.3), 0.1)  # late by 0.2 s, the camera by 0.1 s
    assert watchdog.oldest(float("nan")) is not None  # with a NaN time no stream is fresh


def test_the_watchdog_names_the_stream_furthest_beyond_its_deadline() -> None:
    watchdog = Watchdog({"joints": 0.1, "image.front": 0.25})
    assert watchdog.oldest(0.0) is not None
    watchdog.update("joints", 1.0, None, 1)
    watchdog.update("image.front", 1.0, None, 1)
    assert watchdog.oldest(1.09) is None
    assert watchdog.oldest(1.2) == ("joints", pytest.approx(0.2), 0.1)
    watchdog.update("joints", 1.5, None, 2)
    assert watchdog.oldest(1.5) == ("image.front", 0.5, 0.25)
    watchdog.reset()
    assert watchdog.oldest(1.5) is not None
    with pytest.raises(UserError, match="must be positive"):
        Watchdog({"joints": 0.0})


def test_the_gate_closes_and_opens_with_hysteresis() -> None:
    gate = ObservationGate(
        {"state": ObservationRange(np.zeros(2), np.array([1.0, 2.0]))}, ObservationGateConfig(0.5, 0.25, 3, 4)
    )

    def see(value: float, times: int) -> bool:
        for _ in range(times):
            gate.update({"state": np.array([[0.5, 1.0], [0.5, value]])})
        return gate.closed

    assert not see(2.9, 10)  # 0.45 ranges outside
    assert not see(3.2, 2) and see(3.2, 1)
    assert see(2.9, 10)  # above the reopening bound of 0.25 ranges
    assert see(2.4, 3) and not see(2.4, 1)
    finding = gate.update({"state": np.array([0.5, 3.2])})
    assert finding == ("state[1]", 3.2, 2.0, pytest.approx(0.6))


def test_gate_counts_restart_after_a_change() -> None:
    gate = ObservationGate({"state": ObservationRange(np.zeros(1), np.ones(1))}, ObservationGateConfig(0.5, 0.25, 3, 4))
    for value, times in ((2.0, 3), (0.5, 3)):
        for _ in range(times):
            gate.update({"state": np.array([value])})
        assert gate.closed
    gate.update({"state": np.array([0.5])})
    assert not gate.closed


def test_constant_sensor_may_vary_slightly() -> None:
    gate = ObservationGate({"state": ObservationRange(np.ones(1), np.ones(1))})
    assert gate.update({"state": np.array([1.0004])}).excess == pytest.approx(0.4)  # in units of 0.001


def test_invalid_observation_closes_the_gate_at_once() -> None:
    for obs in ({"state": np.array([0.5, np.nan])}, {}, {"state": np.zeros(3)}):
        gate = ObservationGate({"state": ObservationRange(np.zeros(2), np.ones(2))})
        assert gate.update(obs).excess == np.inf and gate.closed


def test_the_gate_reads_statistics() -> None:
    statistics = {
        "state": {"q01": [0.0], "q99": [1.0], "mean": [5.0], "std": [9.0]},
        "force": {"mean": [1.0], "std": [2.0]},
        "image.front": {"mean": [[[0.5]]]},
    }
    gate = ObservationGate.from_statistics(statistics)
    assert gate.ranges.keys() == {"state", "force"}
    assert (gate.ranges["state"].high, gate.ranges["force"].low) == (1.0, -5.0)
    with pytest.raises(UserError, match="neither q01"):
        ObservationGate.from_statistics({"state": {"min": [0.0]}})


def test_the_emergency_stop_latches(caplog: pytest.LogCaptureFixture) -> None:
    estop = EStop()
    assert not estop.check(0.0)
    with caplog.at_level(logging.WARNING):
        estop.set_level("/estop", True)
        estop.press("keyboard")
        assert estop and estop.cause == "/estop"
        with pytest.raises(UserError, match="while /estop is pressed"):
            estop.reset()
        estop.set_level("/estop", False)
        assert estop.check(1.0)  # released, but latched
        estop.reset()
    assert not estop and "pressed by: /estop" in caplog.text


def test_a_lost_heartbeat_stops() -> None:
    estop = EStop(heartbeat=0.5)
    assert not estop.check(100.0)  # no heartbeat has been received yet
    estop.heartbeat(100.0)
    assert not estop.check(100.4) and estop.check(100.6)
    assert "no heartbeat for 0.60 s" in estop.cause
    estop.reset()
    assert not estop.check(200.0) and not estop.heartbeat_ok  # until the next heartbeat
    estop.heartbeat(200.0)
    assert estop.heartbeat_ok and EStop().heartbeat_ok


def test_a_signal_stops() -> None:
    estop, before = EStop(), signal.getsignal(signal.SIGUSR1)
    with estop.on_signal():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert estop.cause == "SIGUSR1" and signal.getsignal(signal.SIGUSR1) is before


def test_going_home_is_straight_and_slow() -> None:
    inf = np.full(2, np.inf)
    limits = JointLimits(("a", "b"), -np.ones(2), np.ones(2), np.array([1.0, 2.0]), inf, inf, inf)
    position, path = np.array([1.0, 0.5]), []
    policy = go_home(limits, np.zeros(2), speed=0.2)
    while (target := policy(position, 0.1)) is not None:
        path.append(target)
        position = target
    assert len(path) == 50 and not position.any()
    np.testing.assert_allclose(path[24], [0.5, 0.25])
    assert hold(position, 0.1) is None
    with pytest.raises(UserError, match="within the joint limits"):
        go_home(limits, np.array([2.0, 0.0]))
    for speed in (0.0, 1.01, float("nan")):
        with pytest.raises(UserError, match=r"speed of the fall-back must lie in \(0, 1\]"):
            go_home(limits, np.zeros(2), speed)


def test_a_position_is_inside_with_the_slack_at_either_end() -> None:
    inf = np.full(2, np.inf)
    limits = JointLimits(("a", "b"), -np.ones(2), np.ones(2), np.ones(2), inf, inf, inf)
    for value, slack, inside in ((1.0, 0.0, True), (1.05, 0.0, False), (1.05, 0.1, True), (1.15, 0.1, False)):
        assert limits.inside(np.array([value, -value]), slack).tolist() == [inside, inside]
    assert limits.inside(np.array([np.nan, 0.0])).tolist() == [False, True]


def test_interventions_are_counted_logged_and_stored(caplog: pytest.LogCaptureFixture) -> None:
    record = InterventionLog(window=4)
    with caplog.at_level(logging.WARNING):
        for tick in range(150):
            record.tick([SafetyIntervention("velocity", "a", 3.0, 2.0, 0.01 * tick)] if tick % 2 else [])
    assert record.counts == {"velocity": 75} and record.limited_fraction == 0.5 and len(record.recent) == 75
    assert len(caplog.records) == 2  # one per second
    assert "velocity of a: 3, allowed 2" in caplog.text
    assert str(SafetyIntervention("velocity", "a", 3.0, 2.0, 0.0, "m/s")) == "velocity of a: 3 m/s, allowed 2 m/s"
    assert str(SafetyIntervention("estop", "", float("nan"), float("nan"), 0.0)) == "estop"
    record.reset_window()
    assert record.limited_fraction == 0.0


def test_limited_fraction_needs_a_full_window() -> None:
    record, limited = InterventionLog(window=4), [SafetyIntervention("velocity", "a", 3.0, 2.0, 0.0)]
    shares = []
    for _ in range(5):
        record.tick(limited)
        shares.append(record.limited_fraction)
    assert shares == [0.0, 0.0, 0.0, 1.0, 1.0]
