"""Tests of the actions of a person: speed limits, gripper, and the clutch of leader arms."""

from dataclasses import replace

import numpy as np
import pytest
from scripted_device import ScriptedTeleop

from robopolicy.deploy.safety.motion import JointLimits
from robopolicy.errors import UserError
from robopolicy.teleop.contract import TeleopCommand
from robopolicy.teleop.operator import FULL_SPEED_TIME, OPEN, HumanOperator, LeaderOperator

DT = 0.02


def operator(command, *, dims=3, names=(), **options) -> HumanOperator:
    return HumanOperator(ScriptedTeleop(command), -np.ones(dims), np.ones(dims), DT, names, **options)


def forward(after: int, until: int = 10**6):
    """Hold the switch, and move forward in the calls [after, until)."""
    return lambda call: TeleopCommand(call < until, np.array([float(after <= call), 0, 0, 0, 0, 0]))


def test_speed_rises_and_falls_within_the_limit_of_the_filter():
    person = operator(forward(1, until=20))
    moves = [person.move(k * DT) for k in range(40)]
    speeds = np.array([move.action[0] for move in moves])
    assert speeds[0] == 0 and speeds.max() == pytest.approx(1.0)
    assert np.abs(np.diff(speeds)).max() <= DT / FULL_SPEED_TIME + 1e-9
    assert speeds[25:].tolist() == [0.0] * 15, "the motion stops without the switch"
    assert [move.acts for move in moves] == [True] * 24 + [False] * 16, "until the motion has stopped"


def test_the_scale_limits_the_speed():
    person = operator(forward(1), scale=0.3)
    assert max(person.move(k * DT).action[0] for k in range(40)) == pytest.approx(0.3)


def test_the_gripper_keeps_its_last_command_and_opens_for_a_new_episode():
    commands = [0.0, 1.0, 0.0, 0.0, -1.0, 0.0]
    person = operator(lambda k: TeleopCommand(True, gripper=commands[k]), dims=4)
    assert [person.move(k * DT).action[3] for k in range(4)] == [OPEN, 1.0, 1.0, 1.0]
    person.reset()
    assert person.move(0.2).action[3] == OPEN


def test_actions_are_within_the_bounds_of_the_task():
    person = HumanOperator(ScriptedTeleop(forward(1)), np.array([0.0, -2, 1]), np.array([10.0, 2, 3]), DT)
    actions = [person.move(k * DT).action for k in range(30)]
    assert actions[0].tolist() == [5, 0, 2] and actions[-1].tolist() == [10, 0, 2]


def leader(*poses):
    """Leader arm with a joint and a gripper; None lets go."""
    joints = [pose and {"elbow": pose[0], "gripper": pose[1]} for pose in poses]
    return lambda k: TeleopCommand(joints[k] is not None, joints=joints[k])


def test_a_leader_arm_moves_targets_relative_to_the_pose_at_enabling():
    still, later = [(0.8, 0.5)] * 3, [(0.81, 0.5)] * 60
    person = operator(leader(*still, *later), dims=2, names=("elbow [rad]", "gripper [m]"))
    person.reset(np.array([0.2, 0.0]))
    moves = [person.move(k * DT).action for k in range(63)]
    assert [move[0] for move in moves[:3]] == pytest.approx([0.2] * 3), "no jump to 0.8"
    assert moves[-1] == pytest.approx([0.21, 0.0], abs=1e-3)


def test_the_last_target_is_kept_between_two_holds_of_the_clutch():
    poses = [(0.0, 0.5)] * 2 + [(0.2, 0.5)] * 60 + [None] * 30 + [(-0.7, 0.5)] * 3
    person = operator(leader(*poses), dims=2, names=("elbow", "gripper"))
    person.reset(np.zeros(2))
    moves = [person.move(k * DT) for k in range(len(poses))]
    assert moves[61].action[0] == pytest.approx(0.2, abs=1e-3)
    assert [move.action[0] for move in moves[92:]] == pytest.approx([0.2] * 3, abs=1e-3), "the arm moved without it"
    assert not moves[91].acts and moves[92].acts


def test_the_target_is_kept_after_the_arm_is_let_go():
    person = operator(leader(*[(0.0, 0.5)] * 2, *[(0.2, 0.5)] * 60, *[None] * 40), dims=2, names=("elbow", "gripper"))
    person.reset(np.zeros(2))
    moves = [person.move(k * DT).action[0] for k in range(102)]
    assert moves[-30:] == pytest.approx([0.2] * 30, abs=1e-2)


LIMITS = JointLimits(
    ("elbow", "gripper"),
    np.array([-1.0, 0.0]),
    np.array([1.0, 0.04]),
    np.array([2.0, 0.2]),
    np.array([10.0, np.inf]),
    np.full(2, np.inf),
    np.full(2, np.inf),
)


def test_a_leader_arm_moves_a_robot_from_its_measured_pose_within_its_limits():
    poses = [None] * 5 + [(2.0, 0.25)] * 5 + [(2.5, 0.25)] * 50 + [(9.0, 0.75)] * 150
    person = LeaderOperator(ScriptedTeleop(leader(*poses)), LIMITS, DT)
    person.reset()
    person.anchor({"state": np.array([[9.9, 9.9, 9.9, 9.9], [0.3, 0.02, 5.0, 5.0]])})  # history, and velocities
    moves = [person.move(k * DT) for k in range(len(poses))]
    path = np.array([move.action for move in moves])
    assert (path[:5] == [0.3, 0.02]).all() and not moves[4].acts, "the pose is kept without the switch"
    assert path[5:10, 0] == pytest.approx(0.3), "no jump to 2.0"
    assert path[59] == pytest.approx([0.8, 0.01], abs=1e-6)
    assert path[-1] == pytest.approx([1.0, 0.03], abs=5e-3) and path[:, 0].max() <= 1.0
    speed = np.diff(path, axis=0) / DT
    assert (np.abs(speed).max(0) <= [2.0 + 1e-6, 0.2 + 1e-6]).all()
    assert np.abs(np.diff(speed[:, 0])).max() <= 10.0 * DT + 1e-6


def test_a_robot_at_the_end_of_a_joint_has_a_target_within_the_margin():
    person = LeaderOperator(ScriptedTeleop(leader(None)), LIMITS, DT, margin=0.01)
    person.anchor({"state": np.array([[-1.0, 0.04]])})
    assert person.move(0.0).action == pytest.approx([-0.98, 0.0396])


def test_a_gripper_without_a_range_is_refused():
    with pytest.raises(UserError, match="needs a range"):
        LeaderOperator(ScriptedTeleop(leader()), replace(LIMITS, position_high=np.array([1.0, np.inf])), DT)


def test_a_leader_arm_with_other_joints_is_refused():
    person = operator(leader((0.0, 0.5)), dims=2, names=("shoulder", "gripper"))
    with pytest.raises(UserError, match="has the joints elbow, gripper"):
        person.move(0.0)
