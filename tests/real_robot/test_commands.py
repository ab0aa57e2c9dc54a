"""Tests of command messages: targets by joint, the time they are due, and the message fields that hold them."""

import numpy as np
import pytest
from rig import DT, robot_spec

from robopolicy.errors import UserError
from robopolicy_robots.commands import command_message, targets_of
from robopolicy_robots.messages import (
    Duration,
    Float64MultiArray,
    JointState,
    JointTrajectory,
    JointTrajectoryPoint,
    String,
)
from robopolicy_robots.robot import RobotSpec, Topic

COMMAND = np.array([0.1, -0.2, 0.3])


def robot(kind: type, mode: str) -> RobotSpec:
    return robot_spec(mode=mode, command=Topic("/command", kind.ros_name, "command"))  # type: ignore[attr-defined]


def test_a_trajectory_starts_now_and_has_one_point_that_is_due_in_one_period() -> None:
    for mode, field in (("absolute", "positions"), ("velocity", "velocities")):
        message = command_message(robot(JointTrajectory, mode), COMMAND)
        point = JointTrajectoryPoint(**{field: COMMAND}, time_from_start=Duration(0, round(DT * 1e9)))  # type: ignore
        assert message == JointTrajectory(joint_names=("a", "b", "c"), points=(point,))
        assert message.header.stamp.seconds == 0.0  # type: ignore[attr-defined]


def test_states_and_arrays_hold_positions_or_velocities() -> None:
    names = ("a", "b", "c")
    assert command_message(robot(JointState, "absolute"), COMMAND) == JointState(name=names, position=COMMAND)
    assert command_message(robot(JointState, "velocity"), COMMAND) == JointState(name=names, velocity=COMMAND)
    for mode in ("absolute", "velocity"):
        assert command_message(robot(Float64MultiArray, mode), COMMAND) == Float64MultiArray(data=COMMAND)


def test_the_last_point_of_a_trajectory_is_the_target() -> None:
    points = tuple(JointTrajectoryPoint(positions=np.array([k, 2.0 * k])) for k in (1.0, 2.0))
    names, targets = targets_of(JointTrajectory(joint_names=("b", "a"), points=points), ("a", "b"))
    assert names == ("b", "a") and targets.tolist() == [2.0, 4.0]
    assert targets_of(JointState(name=("b",), position=np.ones(1)), ("a", "b"))[0] == ("b",)
    for message in (JointTrajectory(joint_names=("a",)), Float64MultiArray(data=np.ones(3)), String("go")):
        with pytest.raises(UserError, match="has no position for every joint"):
            targets_of(message, ("a", "b"))
