"""Tests of control loop edge cases: velocity commands, before the first command, and at the end."""

from typing import Any

import numpy as np
import pytest
from rig import DT, HORIZON, Rig, follow_wave, robot_spec

from robopolicy.deploy.safety.motion import go_home
from robopolicy.errors import UserError
from robopolicy_robots.loop import STOP_REPEATS, LoopOptions
from robopolicy_robots.messages import Bool
from robopolicy_robots.robot import SafetyConfig
from robopolicy_robots.states import State
from robopolicy_robots.transports.base import COMMAND
from robopolicy_robots.transports.loopback import LoopbackTransport


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def driven_by_velocities(monkeypatch: pytest.MonkeyPatch, start: float, velocity: float, **guard: Any) -> Rig:
    """Return a rig with the robot at `start` [rad] and a policy that commands `velocity` [rad/s] for every joint."""
    rig = Rig(
        monkeypatch, lambda observed: np.full((HORIZON, 3), velocity), mode="velocity", safety=SafetyConfig(**guard)
    )
    rig.robot.position = np.full(3, start)

    def obey() -> None:
        received = rig.robot._commands.latest()
        if received is not None:
            (point,) = received.message.points
            assert len(point.positions) == 0 and point.time_from_start.seconds == pytest.approx(DT)
            rig.robot.position = rig.robot.position + point.velocities * DT

    rig.robot.obey = obey  # type: ignore[method-assign]
    return rig


def test_velocities_are_sent_held_at_zero_and_stop_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = driven_by_velocities(monkeypatch, start=-1.0, velocity=0.5).running(0.8)
    assert rig.ticks[-1].command is not None and rig.ticks[-1].command == pytest.approx(0.5)
    rig.robot.silent = True
    assert rig.until(0.5).state is State.HOLD and not rig.ticks[-1].command.any()  # type: ignore[union-attr]
    rig.robot.silent = False
    rig.until(8.0)
    assert rig.robot.position == pytest.approx(1.5, abs=0.01) and (rig.robot.position <= 1.5).all()
    changes = np.diff([tick.command for tick in rig.ticks if tick.command is not None], axis=0)
    assert np.abs(changes).max() <= 20.0 * DT * (1 + 1e-6)


def test_velocity_commands_skip_the_initial_and_tracking_error_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = driven_by_velocities(
        monkeypatch, start=-1.2, velocity=0.3, max_initial_error=0.1, max_tracking_error=0.01
    ).running(0.5)
    rig.robot.position = rig.robot.position + 0.05  # pushed
    assert rig.until(0.5).state is State.RUN


def test_a_dry_run_ignores_the_tracking_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, safety=SafetyConfig(max_initial_error=2.0, max_tracking_error=0.01))
    rig.loop.options.dry_run = True
    rig.policy = lambda observed: np.full((HORIZON, 3), 0.1)
    rig.running(0.3)
    assert rig.until(0.5).state is State.RUN and rig.robot.sent == 0 and not rig.robot.position.any()


def test_missing_messages_before_the_first_command_cause_no_emergency_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.until(0.3)  # the policy is warm
    rig.policy = lambda observed: None
    rig.loop.arm()
    assert rig.until(0.1).state is State.ARMED
    rig.robot.silent = True
    tick = rig.until(2.0)
    assert tick.state is State.HOLD and tick.command is None and tick.reason == "stale observation: 'joints'"


def test_a_stop_repeats_the_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch).running(1.3)
    sent: list[np.ndarray] = []
    publish = rig.loop.output._publisher.publish
    monkeypatch.setattr(rig.loop.output._publisher, "publish", lambda message: (sent.append(message), publish(message)))
    monkeypatch.setattr("robopolicy_robots.loop.time.sleep", lambda seconds: None)
    rig.loop.stop()
    places = [message.points[0].positions for message in sent]  # type: ignore[attr-defined]
    assert len(places) > STOP_REPEATS == 5
    for place in places[-STOP_REPEATS:]:
        np.testing.assert_array_equal(place, places[-1])


def test_a_failed_warm_up_is_retried_after_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def broken(observed: float) -> Any:
        asked.append(observed)
        raise RuntimeError("no weights")

    rig = Rig(monkeypatch, broken)
    assert rig.until(2.5).state is State.WAIT_OBS and rig.loop.reason == "the policy is not warm"
    assert len(asked) == 3 and np.diff(asked) == pytest.approx(1.0, abs=2 * DT)
    rig.policy = follow_wave
    rig.until(1.1)
    assert rig.running(0.3).loop.state is State.RUN


def test_a_policy_must_answer_three_times_before_the_robot_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[float] = []

    def policy(observed: float) -> np.ndarray:
        answered.append(observed)
        return follow_wave(observed)

    rig = Rig(monkeypatch, policy)
    rig.loop.arm()
    while rig.loop.state is not State.ARMED:
        rig.until(DT)
    assert len(answered) == 4  # the fourth is the first executed chunk


def test_a_publisher_lost_for_a_moment_needs_no_arming(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.running()
    joints = rig.loop.inputs.subscriptions["joints"]
    with monkeypatch.context() as away:
        away.setattr(joints, "_peers", lambda: ())
        assert rig.until(0.3).reason == "peer lost: 0 publishers of /joint_states"
    assert rig.until(0.3).state is State.RUN


def test_a_robot_without_a_command_subscriber_is_held_and_not_armed(rig: Rig) -> None:
    rig.running()
    rig.robot._commands.close()
    rig.robot.obey = lambda: None  # type: ignore[method-assign]
    assert rig.until(0.1).reason == "peer lost: no subscriber of /arm/joint_trajectory"
    rig.loop.estop.press("keyboard")
    rig.until(0.1)
    rig.loop.reset_estop()
    rig.loop.arm()
    assert rig.until(0.3).reason == "no subscriber of /arm/joint_trajectory"
    rig.loop.options.dry_run = True  # a dry run sends no commands
    assert rig.until(0.3).state is State.RUN


def test_a_fallback_is_refused_where_commands_are_velocities(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoopOptions(fallback=go_home(robot_spec().limits, np.zeros(3)))
    with pytest.raises(UserError, match="A fallback needs position commands on a topic, and rig has mode: velocity"):
        Rig(monkeypatch, mode="velocity", options=options)


def test_an_emergency_stop_with_incompatible_qos_prevents_arming(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    button = LoopbackTransport(rig.domain)
    volatile = button.advertise("/estop", Bool, COMMAND)  # `create_publisher(Bool, "estop", 10)`
    rig.loop.arm()
    tick = rig.until(0.5)
    assert tick.state is not State.RUN and "a publisher of /estop has another durability" in tick.reason
    volatile.close()
    assert rig.until(0.5).state is State.RUN
    button.close()


def test_the_fallback_does_not_move_a_robot_without_observations(rig: Rig) -> None:
    rig.loop.options.fallback = go_home(rig.spec.limits, np.zeros(3), speed=0.5)
    rig.running(1.0)
    rig.robot.silent = True
    rig.until(0.3)
    rested = rig.ticks[-1].command
    assert rested is not None and np.abs(rested).min() > 0.05
    np.testing.assert_array_equal(rig.until(0.3).command, rested)


def test_the_loop_brakes_in_the_tick_of_a_policy_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(observed: float) -> Any:
        raise RuntimeError("out of memory")

    rig = Rig(monkeypatch, latency=0.0).running()
    rig.policy = broken
    while not rig.loop.estop:
        tick = rig.until(DT)
    assert tick.state is State.RUN and tick.target is None  # an emergency stop from the next tick on
    assert rig.until(DT).state is State.ESTOP
