"""Tests of the control loop of a robot with a trajectory controller: goals that are replaced, refused and canceled."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rig import ACCELERATION, DT, VELOCITY, Rig, follow_wave, robot_spec
from trajectory_controller import ACTION, DirectClient, TrajectoryController

from robopolicy.deploy.safety.motion import go_home
from robopolicy.errors import UserError
from robopolicy_robots import check as checks
from robopolicy_robots import command_output
from robopolicy_robots.commands import trajectory_of
from robopolicy_robots.loop import LoopOptions
from robopolicy_robots.messages import Bool
from robopolicy_robots.policy_source import PolicyRequirements
from robopolicy_robots.robot import Topic
from robopolicy_robots.states import State
from robopolicy_robots.transports.actions import FOLLOW_JOINT_TRAJECTORY
from robopolicy_robots.transports.loopback import LoopbackTransport

COMMAND = Topic(ACTION, FOLLOW_JOINT_TRAJECTORY)


def goal_rig(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **changes: Any) -> tuple[Rig, TrajectoryController]:
    """Create a rig whose robot has a trajectory controller."""
    controller = TrajectoryController("abc", lambda: rig.now)
    monkeypatch.setattr(LoopbackTransport, "_trajectory_client", lambda *_: DirectClient(controller))
    monkeypatch.setattr(command_output, "time", SimpleNamespace(monotonic=lambda: rig.now))
    rig = Rig(monkeypatch, *arguments, command=COMMAND, **changes)
    monkeypatch.setattr(rig.robot, "obey", lambda: setattr(rig.robot, "position", controller.update(DT)))
    return rig, controller


def check_goals(controller: TrajectoryController) -> None:
    """Assert that every goal keeps the limits, has points at the rate of the loop and ends at rest."""
    for start, goal in zip(controller.starts, controller.goals, strict=True):
        assert goal.joint_names == ("a", "b", "c") and goal.header.stamp.seconds == 0.0
        times = [point.time_from_start.seconds for point in goal.points]
        assert times == pytest.approx([k * DT for k in range(1, len(times) + 1)])
        path = np.stack([start, *(point.positions for point in goal.points)])
        velocity = np.diff(path, axis=0) / DT
        assert np.abs(velocity).max() <= VELOCITY * (1 + 1e-6)
        assert np.abs(np.diff(velocity, axis=0)).max(initial=0.0) / DT <= ACCELERATION * (1 + 1e-6)
        assert np.abs(velocity[-1]).max() < 1e-9


def test_goals_move_the_robot_as_a_stream_of_commands_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Rig(monkeypatch, follow_wave).running(2.0)
    rig, controller = goal_rig(monkeypatch, follow_wave)
    rig.running(2.0)
    expected = np.array([tick.command for tick in stream.ticks if tick.command is not None])
    found = np.array([tick.command for tick in rig.ticks if tick.command is not None])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(rig.robot.position, found[-1], atol=1e-9)
    rig.check_limits()
    check_goals(controller)


def test_every_chunk_is_one_goal_that_replaces_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(2.0)
    chunks = rig.loop.executor.num_chunks - 4  # of the warm-up, and of the start
    assert chunks <= len(controller.goals) <= chunks + 2 < 20 and not controller.canceled
    assert min(len(goal.points) for goal in controller.goals) > 10 and rig.loop.state is State.RUN


def test_the_end_of_the_actions_is_the_end_of_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running()
    rig.policy = lambda _: np.array([object()])  # never answers
    goals = len(controller.goals)
    assert rig.until(1.5).reason == "chunk exhausted" and rig.at_rest() and not controller.busy
    assert len(controller.goals) <= goals + 1, "the goal brakes by itself"
    np.testing.assert_allclose(rig.robot.position, rig.ticks[-1].command, atol=1e-9)  # type: ignore[arg-type]
    rig.policy = follow_wave
    rig.check_limits()


def test_a_hold_replaces_the_goal_by_a_stop_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    rig.robot.silent = True
    assert rig.until(0.3).reason.startswith("stale observation")
    stop = controller.goals[-1]
    assert len(stop.points) <= VELOCITY / ACCELERATION / DT + 2 and rig.at_rest() and not controller.canceled
    np.testing.assert_allclose(rig.robot.position, stop.points[-1].positions, atol=1e-9)
    rig.robot.silent = False
    assert rig.until(0.5).state is State.RUN
    check_goals(controller)


def test_a_rejected_goal_holds_until_the_robot_is_armed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    controller.rejects = True
    tick = rig.until(0.5)
    assert tick.state is State.HOLD and tick.reason == "trajectory goal failed: rejected"
    assert controller.canceled and not controller.busy, "the goal before the rejected one is canceled"
    goals = len(controller.goals)
    controller.rejects = False
    assert rig.until(0.5).state is State.HOLD and len(controller.goals) == goals
    rig.running()
    assert len(controller.goals) > goals
    check_goals(controller)


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (-4, "joint a", "aborted: path tolerance violated: joint a"),
        (-5, "", "aborted: goal tolerance violated"),
        (7, "two\nlines", "aborted: error 7: two lines"),
    ],
)
def test_an_aborted_goal_holds_with_its_error(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str, reason: str
) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    controller.abort(code, text)
    tick = rig.until(2 * DT)
    assert tick.state is State.HOLD and tick.reason == f"trajectory goal failed: {reason}"


def test_a_goal_of_another_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    controller.execute("other", controller.goals[-1], lambda *_: None)
    assert rig.until(2 * DT).reason.startswith("trajectory goal failed: canceled by the server: invalid goal")


def test_an_emergency_stop_cancels_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    goals = len(controller.goals)
    rig.operator.publish(Bool(True))
    assert rig.until(DT).state is State.ESTOP and len(controller.canceled) == 1 and not controller.busy
    rig.until(0.5)
    assert len(controller.goals) == goals and len(controller.canceled) == 1
    rig.operator.publish(Bool(False))
    rig.until(DT)
    rig.loop.reset_estop()
    rig.until(0.1)
    rig.running()
    rig.operator.publish(Bool(True))
    rig.until(DT)
    assert len(controller.canceled) == 2 and not controller.busy


def test_the_end_of_the_loop_brakes_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    monkeypatch.setattr("robopolicy_robots.loop.time.sleep", lambda _: None)
    monkeypatch.setattr(command_output, "time", SimpleNamespace(monotonic=lambda: 0.0))  # no tick is late
    rig.loop.stop()
    assert rig.loop.state is State.STOPPED and len(controller.goals[-1].points) < 10 and controller.canceled
    check_goals(controller)


def test_a_high_effort_replaces_the_goal_by_one_that_brakes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch, joints=tuple(_with_effort(1.0)))
    rig.running(1.0)
    rig.loop.inputs.measured = lambda now, measured=rig.loop.inputs.measured: measured(now)._replace(
        effort=np.array([2.0, 0.0, 0.0])
    )
    goals = len(controller.goals)
    tick = rig.until(DT)
    assert [each.kind for each in tick.interventions] == ["effort"] and len(controller.goals) == goals + 1
    check_goals(controller)


def test_goals_after_missed_ticks_continue_where_the_controller_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch)
    rig.running(1.0)
    path = [rig.robot.position]
    for missed in (0, 2, 0, 1, 0, 3, 0, 0) * 3:
        rig.now += missed * DT
        controller.update()
        rig.robot.say(rig.now)
        rig.loop.note_overrun(missed)
        rig.until(DT)
        steps = np.abs(rig.robot.position - path[-1]).max()
        assert steps <= (missed + 1) * VELOCITY * DT + 1e-9
        np.testing.assert_allclose(rig.robot.position, rig.ticks[-1].command, atol=1e-9)  # type: ignore[arg-type]
        path.append(rig.robot.position)
    assert rig.loop.state is State.RUN
    for start, goal in zip(controller.starts, controller.goals, strict=True):
        first = np.abs(goal.points[0].positions - start).max() / goal.points[0].time_from_start.seconds
        assert first <= VELOCITY * (1 + 1e-6), "no goal begins with a jump"


def test_a_late_goal_has_the_times_of_the_ticks() -> None:
    spec = robot_spec()
    commands = [np.full(3, k / 10) for k in range(1, 5)]
    trajectory = trajectory_of(spec, commands, elapsed=1.7 * DT)
    assert [point.positions[0] for point in trajectory.points] == [0.3, 0.4]
    assert [point.time_from_start.seconds for point in trajectory.points] == pytest.approx([1.3 * DT, 2.3 * DT])
    merged = trajectory_of(spec, commands, elapsed=0.5 * DT, merge_time=2.0 * DT)
    assert [point.positions[0] for point in merged.points] == [0.3, 0.4]
    assert [point.positions[0] for point in trajectory_of(spec, commands, merge_time=1.0).points] == [0.4]
    (last,) = trajectory_of(spec, commands, elapsed=1.0).points
    assert last.positions[0] == 0.4 and last.time_from_start.seconds == pytest.approx(DT)


def test_a_dry_run_sends_no_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, controller = goal_rig(monkeypatch, follow_wave, options=LoopOptions(dry_run=True))
    rig.running(1.0)
    rig.loop.estop.press("test")
    rig.until(DT)
    assert not controller.goals and not controller.canceled


def test_a_fallback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = robot_spec().limits
    with pytest.raises(UserError, match="A fallback needs position commands on a topic, and rig has an action"):
        goal_rig(monkeypatch, options=LoopOptions(fallback=go_home(limits, np.zeros(3))))


def test_the_preflight_check_finds_the_action_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DISCOVERY_TIMEOUT", 0.0)
    monkeypatch.setattr(checks, "MEASURE_TIME", 0.01)
    rig, _ = goal_rig(monkeypatch)
    source: Any = SimpleNamespace(spec=rig.runner.spec)
    requirements = PolicyRequirements("rig", {}, np.zeros(3), np.zeros(3), DT)
    context = checks.PreflightContext(
        rig.spec, rig.loop.transport, rig.embodiment, source, requirements, lambda: rig.loop.transport
    )
    found = {each.name: (each.ok, each.found) for each in checks.check(context)}
    assert found["commands"] == (True, f"1 action server of {ACTION}")
    assert found["command time-out"] == (True, "every goal ends at rest")


def _with_effort(effort: float) -> list[Any]:
    return [replace(joint, effort=effort) for joint in robot_spec().joints]
