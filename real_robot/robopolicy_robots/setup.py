"""Embodiment and requirements of a deployment: of a MuJoCo task, or of a robot alone for a policy of recorded data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from robopolicy.deploy.contract import ChunkPolicy
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.sim.registry import NO_TASK, get_task
from robopolicy_robots.embodiment import Embodiment, JointEmbodiment
from robopolicy_robots.mujoco_topics import prefix_of
from robopolicy_robots.policy_source import PolicyRequirements, metadata_of
from robopolicy_robots.robot import CAMERA, RobotSpec
from robopolicy_robots.task_embodiment import TaskEmbodiment

MAX_ACTION_RATE = 30.0  # [Hz] of a person, so that an action lasts longer than a late answer of a busy computer
Sizes = Mapping[str, tuple[int, int]]  # camera: (height, width)


@dataclass(frozen=True)
class Setup:
    """Connection between a policy and a robot."""

    requirements: PolicyRequirements
    make: Callable[[Sizes], Embodiment]  # embodiment for the cameras of a policy
    names: Mapping[str, tuple[str, ...]]  # of the entries of observations, "action" and "policy_action"
    action_type: str = ""  # `absolute` for joint targets


def task_setup(name: str, task: MujocoTask, robot: RobotSpec) -> Setup:
    """Return the setup of a registered task; raises `UserError` if the robot has no topic for a source."""
    prefix = prefix_of(task.model, robot.names)
    embodiment = TaskEmbodiment(task, prefix)
    for key in embodiment.sources:
        robot.source(key)
    requirements = PolicyRequirements(
        get_task(name).name,
        {key: tensor.shape for key, tensor in task.observation.items()},
        task.action_low,
        task.action_high,
        embodiment.control_dt,
    )
    names = {key: tensor.names for key, tensor in task.observation.items()} | _action_names(task.action_names)
    return Setup(requirements, lambda images: TaskEmbodiment(task, prefix, images), names)


def robot_setup(robot: RobotSpec) -> Setup:
    """Return the setup of a robot without a task or a policy: actions of whole control periods, at most 30 Hz."""
    return _joint_setup(robot, ceil(robot.rate / MAX_ACTION_RATE) / robot.rate, velocities=False)


def joint_setup(source: ChunkPolicy, robot: RobotSpec) -> Setup:
    """Return the setup of a policy that was trained with `task=none`: joint positions and cameras to joint targets.

    `state` holds the positions of the robot's joints in its order, or positions and velocities.

    Raises:
        UserError: The rate of the actions is unknown, or the names of states or actions differ from the joints.
    """
    metadata, joints = metadata_of(source), robot.names
    if metadata is None or metadata.control_dt is None:
        raise UserError(
            f"--task {NO_TASK} needs the rate of the actions, which only checkpoints and bundles of task={NO_TASK} "
            "have; pass one of them, or a task."
        )
    _check_joints("actions", metadata.action_names, robot)
    _check_joints("state", metadata.observation_names.get("state", ())[: len(joints)], robot)
    velocities = source.spec.observation.get("state") == (2 * len(joints),)
    return _joint_setup(robot, metadata.control_dt, velocities=velocities)


def _joint_setup(robot: RobotSpec, dt: float, *, velocities: bool) -> Setup:
    """Return the setup of actions that are joint targets and last `dt` seconds."""
    joints, limits = robot.names, robot.limits
    observation = {"state": (len(joints) * (1 + velocities),)}
    requirements = PolicyRequirements(NO_TASK, observation, limits.position_low, limits.position_high, dt)
    named = tuple(f"{joint.name} [{joint.unit}]" for joint in robot.joints)
    rates = tuple(f"{joint.name} [{joint.unit}/s]" for joint in robot.joints) if velocities else ()
    return Setup(
        requirements,
        lambda images: JointEmbodiment(joints, dt, images, velocities=velocities),
        {"state": named + rates, **_action_names(named)},
        "absolute",
    )


def _action_names(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {"action": names, "policy_action": names}


def _check_joints(what: str, names: tuple[str, ...] | list[str], robot: RobotSpec) -> None:
    """Compare names such as `elbow [rad]` with the joints of a robot."""
    if not names:
        return
    found = [re.fullmatch(r"(.*?)(?: \[(.*)\])?", name, re.DOTALL) for name in names]
    plain = [match[1] if match else name for match, name in zip(found, names, strict=True)]
    if plain != list(robot.names):
        raise UserError(
            f"The {what} of the policy are {', '.join(plain)}, and the joints of {robot.name} are "
            f"{', '.join(robot.names)}; list the joints in that order, or rename the entries of the dataset."
        )
    units = {joint.name: joint.unit for joint in robot.joints}
    for match, name in zip(found, plain, strict=True):
        if match and match[2] and match[2] != units[name]:
            raise UserError(f"'{name}' of the policy is in {match[2]}, and {robot.name} takes {units[name]}.")


def images_of(source: ChunkPolicy) -> dict[str, tuple[int, int]]:
    """Cameras of a policy and their image sizes."""
    shapes = source.spec.observation.items()
    return {key.removeprefix(CAMERA): (shape[1], shape[2]) for key, shape in shapes if key.startswith(CAMERA)}
