"""Tests of the control loop on a fake clock: states, arming, resuming and the faults of the acceptance table."""

import json
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from rig import DT, EPOCH, HORIZON, Rig, RobotSide, follow_wave, wave

from robopolicy.deploy.safety.motion import go_home
from robopolicy.deploy.safety.ood import ObservationGate, ObservationRange
from robopolicy.errors import UserError
from robopolicy_robots.loop import LoopOptions
from robopolicy_robots.messages import Bool, String
from robopolicy_robots.robot import SafetyConfig
from robopolicy_robots.states import Reason, State
from robopolicy_robots.transports.base import LATCHED
from robopolicy_robots.transports.faults import Faults
from robopolicy_robots.transports.loopback import LoopbackTransport

STALE = 0.1  # [s]
FIRST_STEP = 20.0 * DT**2 * (1 + 1e-6)  # [rad] in the first period of a ramp


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def states(rig: Rig) -> list[State]:
    return [state for state, _ in groupby(tick.state for tick in rig.ticks)]


def test_the_loop_goes_from_disconnected_to_following_the_policy(rig: Rig) -> None:
    rig.robot.silent = True
    assert rig.until(0.1).state is State.DISCONNECTED
    rig.robot.silent = False
    assert rig.until(0.3).state is State.WAIT_OBS and rig.loop.reason == ""
    assert all(tick.command is None for tick in rig.ticks)  # nothing is sent before it is armed
    rig.loop.arm()
    rig.until(3.0)
    assert states(rig) == [State.DISCONNECTED, State.WAIT_OBS, State.ARMED, State.RUN]
    np.testing.assert_allclose(rig.robot.position, wave(rig.now), atol=1e-9)
    rig.check_limits()


def test_a_dry_run_computes_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, options=LoopOptions(dry_run=True)).running()
    assert rig.ticks[-1].command is not None and rig.robot.sent == 0


def test_latency_is_compensated(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for latency in (0.0, 0.15):
        rig = Rig(monkeypatch, latency=latency).running(4.0)
        errors.append(max(np.abs(tick.command - wave(tick.now)).max() for tick in rig.ticks[-100:]))
    assert errors[1] <= 1.1 * errors[0] + 1e-9


def test_non_finite_actions_hold_and_are_never_sent(rig: Rig) -> None:
    rig.running()
    rig.policy = lambda observed: follow_wave(observed) * np.nan
    start = rig.now
    tick = rig.until(1.0)
    assert rig.after(start, State.HOLD) <= 8 * DT + rig.runner.latency + 2 * DT  # with the next chunk
    assert tick.state is State.HOLD and tick.reason.startswith(Reason.NON_FINITE) and rig.at_rest()
    rig.policy = follow_wave
    assert rig.until(0.5).state is State.RUN
    assert rig.loop.log.counts["policy non-finite"] >= 1
    rig.check_limits()


@pytest.mark.parametrize("chunk", [np.zeros((HORIZON, 2)), np.zeros(3), "wave", np.zeros((HORIZON, 3), complex)])
def test_chunks_of_the_wrong_shape_hold(rig: Rig, chunk: Any) -> None:
    rig.running()
    rig.policy = lambda observed: chunk
    tick = rig.until(1.0)
    assert tick.state is State.HOLD and tick.reason.startswith(Reason.WRONG_SHAPE) and rig.at_rest()
    rig.check_limits()


def test_a_hanging_policy_holds_at_the_end_of_its_chunk(rig: Rig) -> None:
    rig.running()
    rig.policy = lambda observed: None
    start = rig.now
    tick = rig.until(2.0)
    assert rig.after(start, State.HOLD) <= HORIZON * DT + 2 * DT
    assert tick.reason == Reason.CHUNK_EXHAUSTED and rig.at_rest()
    rig.check_limits()


def test_a_policy_that_raises_stops_within_a_tick(rig: Rig) -> None:
    def broken(observed: float) -> Any:
        raise RuntimeError("out of memory")

    rig.running()
    rig.runner.latency = 0.0
    rig.policy = broken
    start = rig.now
    tick = rig.until(0.6)
    assert rig.after(start, State.ESTOP) <= 10 * DT  # at most one tick after the request
    assert tick.reason == "policy exception: RuntimeError: out of memory" and rig.at_rest()
    rig.check_limits()


def test_an_unavailable_server_holds_and_resumes(rig: Rig) -> None:
    def away(observed: float) -> Any:
        raise UserError("The policy server does not answer.")

    rig.running()
    rig.policy = away
    tick = rig.until(2.0)
    assert tick.state is State.HOLD and tick.reason == "policy unavailable: The policy server does not answer."
    rig.policy = follow_wave
    assert rig.until(0.5).state is State.RUN
    rig.check_limits()


def test_missing_messages_hold_at_once_and_stop_after_one_second(rig: Rig) -> None:
    rig.running()
    rig.robot.silent = True
    start = rig.now
    tick = rig.until(2.0)
    assert rig.after(start, State.HOLD) <= STALE + 2 * DT
    assert 1.0 <= rig.after(start, State.ESTOP) <= 1.0 + 2 * DT
    assert tick.reason.startswith("no message of 'joints' for 1.0") and rig.at_rest()
    rig.robot.silent = False
    assert rig.until(1.0).state is State.ESTOP  # latched
    rig.loop.reset_estop()
    assert rig.until(0.5).state is State.WAIT_OBS
    assert rig.running().loop.state is State.RUN
    rig.check_limits()


def test_the_loop_resumes_from_the_measured_position_after_a_short_silence(rig: Rig) -> None:
    rig.running(1.0)
    rig.robot.silent = True
    assert rig.until(0.8).reason == "stale observation: 'joints'"
    rig.robot.silent = False
    rig.robot.position = rig.robot.position + 0.05  # moved by hand
    moved = rig.robot.position.copy()
    rig.robot.stuck = True
    start = rig.now
    rig.until(0.3)
    first = next(tick for tick in rig.ticks if tick.now > start and tick.state is State.RUN)
    assert first.now - start <= 0.1
    assert first.command is not None and np.abs(first.command - moved).max() <= FIRST_STEP
    assert rig.embodiment.starts >= 3


def test_a_backlog_holds_although_messages_arrive(rig: Rig) -> None:
    rig.running()
    rig.robot.skew = -0.4  # messages are 0.4 s old: the stamps freeze for 0.4 s
    rig.robot.stamp = EPOCH + rig.now
    rig.until(0.4)
    rig.robot.stamp = None
    tick = rig.until(0.3)
    assert tick.state is State.HOLD and tick.reason == "stale observation: 'joints'"
    rig.check_limits()


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_lost_messages_in_both_directions_cause_no_estop(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    rig = Rig(monkeypatch, faults=Faults(drop=share))
    while rig.loop.state is not State.RUN:  # arm again if a message was lost
        rig.loop.arm()
        rig.until(0.1)
    rig.until(20.0)
    assert State.ESTOP not in states(rig)
    assert np.mean([tick.state is State.RUN for tick in rig.ticks[-1000:]]) > (0.99 if share < 0.2 else 0.8)
    rig.check_limits()


def test_frozen_stamps_hold(rig: Rig) -> None:
    rig.running()
    start, rig.robot.stamp = rig.now, EPOCH + rig.now
    rig.until(0.5)
    assert rig.after(start, State.HOLD) <= STALE + 2 * DT
    rig.check_limits()


def test_messages_out_of_order_change_nothing(rig: Rig) -> None:
    rig.running()
    for _ in range(20):
        rig.robot.stamp = EPOCH + rig.now - 0.05
        rig.until(DT)
        rig.robot.stamp = None
        rig.until(2 * DT)
    assert {tick.state for tick in rig.ticks[-60:]} == {State.RUN}
    assert rig.loop.inputs.watchdog.streams["joints"].out_of_order == 20


def test_a_camera_that_stops_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, sources=("image.front",)).running()
    rig.robot.blind = True
    start = rig.now
    tick = rig.until(0.6)
    assert rig.after(start, State.HOLD) <= 0.25 + 2 * DT and tick.reason == "stale camera: 'image.front'"
    rig.robot.blind = False
    assert rig.until(0.5).state is State.RUN


@pytest.mark.parametrize("skew", [10.0, -10.0])
def test_clocks_may_differ_and_may_jump(rig: Rig, skew: float) -> None:
    rig.robot.skew = skew
    rig.running(1.0)
    rig.robot.skew = 0.0
    rig.until(1.0)
    rig.robot.skew = -skew
    rig.until(1.0)
    assert {tick.state for tick in rig.ticks[-110:]} == {State.RUN}
    assert rig.loop.inputs.watchdog.streams["joints"].jumps == 2


def test_extreme_targets_are_limited_and_then_hold(rig: Rig) -> None:
    rig.running()
    rng = np.random.default_rng(0)
    rig.policy = lambda observed: rng.uniform(-3, 3, (HORIZON, 3))
    tick = rig.until(4.0)
    assert tick.state is State.HOLD and tick.reason.startswith(Reason.SATURATION) and rig.at_rest()
    assert rig.loop.log.counts["velocity"] > 100
    rig.check_limits()
    rig.policy = follow_wave
    assert rig.until(1.0).state is State.HOLD  # an operator has to arm it again
    rig.running()


def test_a_second_publisher_holds_until_it_is_armed_again(rig: Rig) -> None:
    rig.running()
    second_robot = RobotSide(rig.domain, rig.spec)
    start = rig.now
    second_robot.say(rig.now)
    tick = rig.until(0.5)
    assert rig.after(start, State.HOLD) <= 2 * DT and tick.reason == "publisher changed: 2 publishers of /joint_states"
    second_robot.transport.close()
    assert rig.until(1.0).state is State.HOLD
    rig.robot.silent = True
    rig.until(0.5)
    rig.robot.silent = False
    assert rig.until(1.0).state is State.HOLD  # stale observations in between do not arm the loop
    rig.running()
    rig.check_limits()


def test_a_dead_robot_holds_then_stops_and_needs_arming_on_return(rig: Rig) -> None:
    rig.running()
    start = rig.now
    rig.robot.transport.close()
    rig.robot.silent = rig.robot.blind = True
    rig.robot.obey = lambda: None  # type: ignore[method-assign]
    rig.until(1.5)
    assert rig.after(start, State.HOLD) <= STALE + 2 * DT and rig.after(start, State.ESTOP) <= 1.0 + 2 * DT
    position = rig.robot.position
    rig.robot = RobotSide(rig.domain, rig.spec)
    rig.robot.position = position
    rig.loop.reset_estop()
    assert rig.until(1.0).state is State.WAIT_OBS
    rig.running()


def test_a_restarted_publisher_within_a_second_needs_arming(rig: Rig) -> None:
    rig.running()
    rig.robot.transport.close()
    position, rig.robot = rig.robot.position, RobotSide(rig.domain, rig.spec)
    rig.robot.position = position
    tick = rig.until(0.5)
    assert tick.state is State.HOLD and tick.reason == "publisher changed: another publisher of /joint_states"


def test_joints_are_matched_by_name_and_all_are_required(rig: Rig) -> None:
    rig.robot.names = ["c", "b", "a"]
    rig.running(2.0)
    np.testing.assert_allclose(rig.robot.position, wave(rig.now), atol=1e-9)
    rig.robot.names = ["c", "b"]
    tick = rig.until(0.3)
    assert tick.state is State.HOLD and tick.reason == "bad observation: the joint state lacks a"
    assert rig.at_rest()


def test_arming_reports_the_missing_condition(rig: Rig) -> None:
    rig.robot.names = ["a", "b"]
    rig.loop.arm()
    assert rig.until(0.2).state is State.WAIT_OBS and rig.loop.reason == "the joint state lacks c"
    rig.robot.names = ["a", "b", "c"]
    rig.robot.position = np.array([0.0, 1.6, 0.0])
    rig.until(0.2)
    assert rig.loop.reason == "b is outside its limits"
    rig.robot.position = np.array([0.0, np.nan, 0.0])
    rig.until(0.2)
    assert rig.loop.reason == "the position of b is not finite"
    assert all(tick.command is None for tick in rig.ticks)


def test_a_distant_first_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, safety=SafetyConfig())
    rig.policy = lambda observed: np.ones((HORIZON, 3))
    rig.loop.arm()
    tick = rig.until(0.5)
    assert tick.state is State.HOLD and tick.reason == "first command too far: a: 1 rad, allowed 0.5 rad"
    assert (rig.robot.position == 0).all()


def test_the_emergency_stop_interrupts_a_chunk(rig: Rig) -> None:
    rig.running(1.5)
    rig.operator.publish(Bool(True))
    start = rig.now
    tick = rig.until(0.5)
    assert rig.after(start, State.ESTOP) <= DT * 1.01 and tick.reason == "/estop" and rig.at_rest()
    with pytest.raises(UserError, match="cannot be reset while /estop is pressed"):
        rig.loop.reset_estop()
    with pytest.raises(UserError, match="cannot be armed: /estop"):
        rig.loop.arm()
    rig.operator.publish(Bool(False))
    assert rig.until(0.5).state is State.ESTOP
    rig.loop.reset_estop()
    assert rig.until(0.5).state is State.WAIT_OBS
    rig.running()
    rig.check_limits()


def test_a_robot_that_does_not_follow_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, safety=SafetyConfig(max_tracking_error=0.1)).running(0.3)
    rig.robot.stuck = True
    tick = rig.until(2.0)
    assert tick.state is State.HOLD and tick.reason.startswith(Reason.TRACKING)


def test_late_ticks_in_a_row_hold(rig: Rig) -> None:
    rig.running()
    for _ in range(rig.spec.safety.max_overruns):
        rig.loop.note_overrun(1)
    assert rig.until(DT).reason == "overrun: 5 late ticks in a row"
    rig.loop.note_overrun(0)
    assert rig.until(0.5).state is State.RUN and rig.loop.overruns == 5


def test_out_of_distribution_observations_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = ObservationGate({"state": ObservationRange(np.full(3, -0.2), np.full(3, 0.2))})
    rig = Rig(monkeypatch, options=LoopOptions(gate=gate)).running(0.2)
    tick = rig.until(1.5)
    assert tick.state is State.HOLD and tick.reason.startswith("out-of-distribution observation: state[")
    assert rig.loop.log.counts["gate"] >= 1
    rig.robot.stuck, rig.robot.position = True, np.zeros(3)  # moved back by hand
    rig.policy = lambda observed: np.zeros((HORIZON, 3))
    assert rig.until(1.0).state is State.RUN


def test_the_fallback_moves_the_robot_while_the_policy_gives_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.loop.options.fallback = go_home(rig.spec.limits, np.zeros(3), speed=0.5)
    rig.running(1.0)
    rig.policy = lambda observed: None
    rig.until(3.0)
    np.testing.assert_allclose(rig.robot.position, 0.0, atol=1e-9)
    rig.check_limits()


def test_an_operator_can_hold_and_resume(rig: Rig) -> None:
    rig.running()
    rig.loop.deactivate()
    assert rig.until(1.0).reason == "operator" and rig.at_rest()
    rig.running()
    rig.check_limits()


def test_the_status_is_published(rig: Rig) -> None:
    subscription = LoopbackTransport(rig.domain).subscribe(rig.spec.status.topic, String, LATCHED)
    rig.running()
    received = subscription.latest()
    assert received is not None
    status = json.loads(received.message.data)
    assert status["state"] == "RUN" and status["ages"]["joints"] < STALE and status["robot"] == "rig"


def test_stop_brakes_and_ends_publishing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robopolicy_robots.loop.time.sleep", lambda seconds: rig.robot.obey())
    rig.running(1.0)
    rig.loop.stop()
    rig.loop.stop()  # a second stop changes nothing
    assert rig.loop.state is State.STOPPED and rig.runner.closed
    sent = rig.robot.sent
    assert rig.until(0.2).command is None and rig.robot.sent <= sent + 1
    with pytest.raises(UserError, match="the loop has ended"):
        rig.loop.arm()


def test_a_mismatch_of_robot_and_embodiment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"Unknown source 'image.wrist'"):
        Rig(monkeypatch, sources=("image.wrist",))
    monkeypatch.setattr("rig.Embodiment.__init__", lambda self: self.__dict__.update(joints=("a",), control_dt=DT))
    with pytest.raises(UserError, match="The joints of robot and embodiment differ: only one has b, c"):
        Rig(monkeypatch)
