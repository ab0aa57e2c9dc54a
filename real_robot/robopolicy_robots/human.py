"""Person who moves a robot in `deploy`, alone or taking over from a policy."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing

from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.deploy.contract import ChunkPolicy
from robopolicy.errors import UserError
from robopolicy.teleop.chunk_policy import HumanChunkPolicy
from robopolicy.teleop.contract import Teleop
from robopolicy.teleop.devices import open_device
from robopolicy.teleop.leader import check_leader
from robopolicy.teleop.operator import HumanOperator, LeaderOperator, Teleoperator
from robopolicy_robots.policy_source import open_source
from robopolicy_robots.robot import CAMERA, RobotSpec
from robopolicy_robots.setup import Setup, joint_setup, robot_setup

log = logging.getLogger(__name__)
HEAVY = 50e6  # [bytes/s] of images, which stay in memory until the end of their episode


def open_human(
    args: argparse.Namespace, robot: RobotSpec, setup: Setup | None, stack: ExitStack
) -> tuple[HumanChunkPolicy, Setup]:
    """Open the device of `--teleop`, the policy of `--policy` and the dataset of `--demonstrations`, if any.

    Without a policy, the cameras of the robot are observed if they are recorded or if the device shows images.

    Args:
        args: Options of `deploy`.
        robot: Robot that the person moves.
        setup: Setup of the task; None without a task, for a leader arm with the joints of the robot.
        stack: Closes what is opened.

    Raises:
        UserError: One of them cannot be opened, or the device does not fit the robot.
    """
    base = None if args.policy is None else stack.enter_context(closing(open_source(args.policy, args.device)))
    device = stack.enter_context(closing(open_device(args.teleop)))
    operator, setup = _operator(device, robot, setup, base)
    requirements = setup.requirements
    sink = None
    if args.demonstrations is not None:
        options = {"names": setup.names, "action_type": setup.action_type, "overwrite": args.overwrite}
        options["keep_on_error"] = True
        sink = stack.enter_context(LeRobotWriter(args.demonstrations, control_dt=requirements.control_dt, **options))
    observation: Mapping[str, tuple[int, ...]] = requirements.observation
    if base is None and (sink is not None or device.shows_images):
        observation = {**observation, **{CAMERA + each.name: (3, each.height, each.width) for each in robot.cameras}}
        rate = sum(3 * each.height * each.width for each in robot.cameras) / requirements.control_dt
        if sink is not None and rate > HEAVY:
            text = "Images of an episode need %.0f MB/s of memory until its end; lower the sizes or the rate of %s."
            log.warning(text, rate / 1e6, robot.name)
    return HumanChunkPolicy(operator, requirements.task, observation, base=base, sink=sink), setup


def _operator(
    device: Teleop, robot: RobotSpec, setup: Setup | None, base: ChunkPolicy | None
) -> tuple[Teleoperator, Setup]:
    """Operator of the actions of a task, or of the joints of the robot."""
    if setup is not None:
        requirements = setup.requirements
        bounds = requirements.low, requirements.high
        return HumanOperator(device, *bounds, requirements.control_dt, setup.names["action"]), setup
    joints = device.read(time.monotonic()).joints
    if joints is None:
        raise UserError(
            "Without a task, --teleop needs a leader arm with the joints of the robot, e.g. "
            "lerobot:so101_leader:/dev/ttyACM0; this device moves the tool of a task."
        )
    check_leader(joints, robot.names)
    for joint in robot.joints:
        if joint.unit != "rad" and not joint.gripper:
            raise UserError(f"A leader arm gives angles, and '{joint.name}' of {robot.name} is in {joint.unit}.")
    setup = robot_setup(robot) if base is None else joint_setup(base, robot)
    return LeaderOperator(device, robot.limits, setup.requirements.control_dt, robot.safety.margin), setup
