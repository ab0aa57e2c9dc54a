"""Conversion between safe commands and messages of a robot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from robopolicy.deploy.safety.motion import Array
from robopolicy.errors import UserError
from robopolicy_robots.message import Message
from robopolicy_robots.messages import Duration, Float64MultiArray, JointState, JointTrajectory, JointTrajectoryPoint
from robopolicy_robots.robot import RobotSpec


def command_message(robot: RobotSpec, command: Array) -> Message:
    """Message for `command` `(J,)`: positions, or velocities in velocity mode.

    Trajectories have a stamp of zero ("from now"), since clocks may differ, and one point, due in one period.
    """
    velocity = robot.mode == "velocity"
    if robot.command.type == JointTrajectory.ros_name:
        due = Duration.from_seconds(robot.dt)
        key = "velocities" if velocity else "positions"
        point = JointTrajectoryPoint(**{key: command}, time_from_start=due)
        return JointTrajectory(joint_names=robot.names, points=(point,))
    if robot.command.type == Float64MultiArray.ros_name:
        return Float64MultiArray(data=command)
    if robot.command.type == JointState.ros_name:
        fields: dict[str, Any] = {"velocity" if velocity else "position": command}
        return JointState(name=robot.names, **fields)
    raise UserError(f"Commands of type {robot.command.type} are not supported.")


def trajectory_of(
    robot: RobotSpec, commands: Sequence[Array], elapsed: float = 0.0, merge_time: float = 0.0
) -> JointTrajectory:
    """Trajectory through `commands`, positions `(J,)` of consecutive control periods that began `elapsed` seconds ago.

    Points that are due within `merge_time` [s] or half a period are left out, but never the last one.
    """
    times = [k * robot.dt - elapsed for k in range(1, len(commands) + 1)]
    times[-1] = max(times[-1], robot.dt)
    points = tuple(
        JointTrajectoryPoint(positions=command, time_from_start=Duration.from_seconds(seconds))
        for command, seconds in zip(commands, times, strict=True)
        if seconds > max(robot.dt / 2, merge_time) or seconds == times[-1]
    )
    return JointTrajectory(joint_names=robot.names, points=points)


def targets_of(message: Message, order: tuple[str, ...]) -> tuple[tuple[str, ...], Array]:
    """Joint names (`order` for unnamed joints) and targets of a command; raises `UserError` without positions."""
    if isinstance(message, JointTrajectory) and message.points:
        return message.joint_names, message.points[-1].positions
    if isinstance(message, JointState):
        return message.name, message.position
    if isinstance(message, Float64MultiArray) and len(message.data) == len(order):
        return order, message.data
    raise UserError(f"The command of type {message.ros_name} has no position for every joint.")
