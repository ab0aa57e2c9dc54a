"""Convert a URDF or an MJCF file to a robot description (YAML): joints in order, ranges, velocities, efforts.

    python -m robopolicy_robots.import_urdf arm.urdf --name my_arm --out my_arm.yaml
    python -m robopolicy_robots.import_urdf sim_assets/panda.xml --name panda --prefix panda_ --velocity 2.175

URDF contains all limits for the safety filter. MJCF has no velocity limits, so they must be given. A missing limit is
an error. Neither format has limits of acceleration and jerk, which are therefore unlimited. Only MJCF needs MuJoCo.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import yaml

from robopolicy.atomic import write_text
from robopolicy.cli.options import add_overwrite_option
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import check_new_file
from robopolicy_robots.messages import JointState, JointTrajectory
from robopolicy_robots.robot import Joint, RobotSpec, Topic

if TYPE_CHECKING:
    import mujoco

MOVING = ("revolute", "continuous", "prismatic")  # URDF types of joints that can be commanded
XACRO = "ros.org/wiki/xacro"


@dataclass(frozen=True)
class ParsedJoint:
    """Properties of a joint in a file; None if missing."""

    name: str
    low: float | None
    high: float | None
    velocity: float | None
    effort: float | None
    home: float
    unit: str
    gripper: bool = False


def read(path: Path, prefix: str = "") -> list[ParsedJoint]:
    """Read the joints that can be commanded from URDF or MJCF, with `prefix` before their names."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from error
    if any(XACRO in node.tag for node in root.iter()):
        raise UserError(f"{path.name} is a xacro file; run: xacro {path.name} > robot.urdf")
    if root.tag == "robot":
        nodes = [node for node in root.findall("joint") if node.get("type") in MOVING and node.find("mimic") is None]
        return [_of_urdf(node, prefix) for node in nodes]
    if root.tag == "mujoco":
        return _of_mjcf(path, prefix)
    raise UserError(f"{path.name} is neither URDF (<robot>) nor MJCF (<mujoco>), found <{root.tag}>.")


def _of_urdf(node: ElementTree.Element, prefix: str) -> ParsedJoint:
    name, limit = prefix + node.get("name", ""), node.find("limit")
    numbers: dict[str, float | None] = {}
    for key in ("lower", "upper", "velocity", "effort"):
        text = None if limit is None else limit.get(key)
        try:
            numbers[key] = None if text is None else float(text)
        except ValueError as error:
            raise UserError(f"The limit '{key}' of joint '{name}' is not a number: '{text}'.") from error
    low, high = numbers["lower"], numbers["upper"]
    if node.get("type") == "continuous":
        low, high = -math.inf, math.inf
    elif limit is not None:  # a missing bound is 0 in URDF
        low, high = low or 0.0, high or 0.0
    home = 0.0 if low is None or high is None else min(max(0.0, low), high)
    unit = "m" if node.get("type") == "prismatic" else "rad"
    return ParsedJoint(name, low, high, numbers["velocity"], numbers["effort"], home, unit)


def _of_mjcf(path: Path, prefix: str) -> list[ParsedJoint]:
    import mujoco

    from robopolicy_robots.mujoco_topics import MujocoTopics

    try:
        model = mujoco.MjModel.from_xml_path(str(path))
    except ValueError as error:
        raise UserError(f"MuJoCo cannot read {path.name}: {' '.join(str(error).split())}") from error
    topics, found = MujocoTopics(model), []
    pose = model.key_qpos[0] if model.nkey else model.qpos0
    rows = zip(topics.commanded, topics.actuators, topics.targets, topics.is_gripper, strict=True)
    for name, actuator, index, gripper in rows:
        joint = model.joint(name)
        low, high = joint.range if model.jnt_limited[joint.id] else (None, None)
        home = float(pose[index])
        if low is not None and high is not None:
            low, high = float(low), float(high)
            home = min(max(home, low), high)
        unit = "m" if model.jnt_type[joint.id] == mujoco.mjtJoint.mjJNT_SLIDE else "rad"
        effort = _effort(model, actuator)
        found.append(ParsedJoint(prefix + name, low, high, None, effort, home, unit, bool(gripper)))
    return found


def _effort(model: mujoco.MjModel, actuator: int) -> float | None:
    """Maximum force or torque of an actuator on its joint; None without a limit or for other transmissions."""
    import mujoco

    if model.actuator_trntype[actuator] != mujoco.mjtTrn.mjTRN_JOINT:
        return None
    limits = []
    if model.actuator_forcelimited[actuator]:
        limits.append(np.abs(model.actuator_forcerange[actuator]).max() * abs(model.actuator_gear[actuator, 0]))
    joint = model.actuator_trnid[actuator, 0]
    if model.jnt_actfrclimited[joint]:
        limits.append(np.abs(model.jnt_actfrcrange[joint]).max())
    return float(min(limits)) if limits else None


def robot_spec(found: Sequence[ParsedJoint], args: argparse.Namespace) -> RobotSpec:
    """Create a robot description; raises `UserError` if a joint is unknown or lacks a limit."""
    known = {joint.name: joint for joint in found}
    names = args.joints or list(known)
    if not names:
        raise UserError("The file has no joints that can be commanded.")
    velocities = {name: _numbers(text, 1)[0] for name, text in map(_named, args.velocity)}
    ranges = {name: _numbers(text, 2) for name, text in map(_named, args.range)}
    default = velocities.pop("", None)
    for name in (*names, *velocities, *ranges, *args.gripper):
        if name not in known:
            raise unknown_name("joint", name, known)
    joints: list[Joint] = []
    for name in names:
        joint = known[name]
        low, high = ranges.get(name, (joint.low, joint.high))
        velocity = velocities.get(name, default if default is not None and joint.unit == "rad" else joint.velocity)
        if low is None or high is None:
            raise UserError(f"Joint '{name}' has no range; set it with --range {name}=LOW,HIGH.")
        if not velocity:  # exporters write 0 for unknown limits
            raise UserError(f"Joint '{name}' has no velocity limit; set it with --velocity {name}=VALUE.")
        effort = joint.effort or math.inf
        home, gripper = min(max(joint.home, low), high), joint.gripper or name in args.gripper
        joints.append(Joint(name, velocity, low, high, effort=effort, home=home, unit=joint.unit, gripper=gripper))
    state = Topic(args.state, JointState.ros_name)
    return RobotSpec(args.name, tuple(joints), state, Topic(args.command, args.type, "command"), rate=args.rate)


def _named(option: str) -> tuple[str, str]:
    name, _, text = option.rpartition("=")
    return name, text


def _numbers(text: str, count: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != count or any(map(math.isnan, numbers)):
        raise UserError(f"Expected {'JOINT=LOW,HIGH' if count == 2 else 'JOINT=NUMBER'}, got '{text}'.")
    return numbers


def text_of(robot: RobotSpec, source: str) -> str:
    """Content of the YAML file."""
    required, default = ("name", "low", "high", "velocity"), Joint("", 0.0)
    rows = [
        {
            key: getattr(joint, key)
            for key in (*required, "effort", "home", "unit", "gripper")
            if key in required or getattr(joint, key) != getattr(default, key)
        }
        for joint in robot.joints
    ]
    return "\n".join(
        [
            f"# {robot.name}, made from {source} by robopolicy_robots.import_urdf.",
            "#",
            "# Limits are from that file and the command line. Acceleration and jerk are not limited; add their",
            "# limits (acceleration, jerk) if they are published. Check the topics and the home pose.",
            f"name: {_flow(robot.name)}",
            "joints:",
            *(f"  - {_flow(row)}" for row in rows),
            f"state: {_flow(asdict(robot.state))}",
            f"command: {_flow(asdict(robot.command))}",
            f"rate: {_flow(robot.rate)}",
            "",
        ]
    )


def _flow(value: Any) -> str:
    """YAML on one line, with integers for whole numbers."""
    if isinstance(value, Mapping):
        value = {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in value.items()}
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).removesuffix("...\n").strip()


def parser() -> argparse.ArgumentParser:
    """Create the argument parser."""
    description = "Convert a URDF or MJCF file to a robot description."
    found = argparse.ArgumentParser("python -m robopolicy_robots.import_urdf", description=description)
    found.add_argument("file", type=Path, help="URDF or MJCF file")
    found.add_argument("--name", required=True, help="name of the robot")
    found.add_argument("--prefix", default="", help="prefix of joint names in messages")
    found.add_argument("--joints", nargs="+", help="joints in the order of commands (default: all, as in the file)")
    velocity = "velocity limits: of one joint [rad/s, m/s], or of all revolute joints"
    found.add_argument("--velocity", nargs="+", default=[], metavar="[JOINT=]V", help=velocity)
    found.add_argument("--range", nargs="+", default=[], metavar="JOINT=LOW,HIGH", help="range of a joint [rad, m]")
    found.add_argument("--gripper", nargs="+", default=[], metavar="JOINT", help="joints of a gripper")
    state = "topic of the JointState (default: /joint_states)"
    found.add_argument("--state", default="/joint_states", metavar="TOPIC", help=state)
    topic, kind = "/joint_trajectory_controller/joint_trajectory", JointTrajectory.ros_name
    found.add_argument("--command", default=topic, metavar="TOPIC", help="topic of the commands")
    found.add_argument("--type", default=kind, help=f"message type of the commands (default: {kind})")
    found.add_argument("--rate", type=float, default=50.0, help="commands per second (default: 50)")
    found.add_argument("--out", type=Path, metavar="FILE.yaml", help="output file (default: the terminal)")
    add_overwrite_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write the description; exit code 2 for invalid input."""
    args = parser().parse_args(argv)
    try:
        if args.overwrite and args.out is None:
            raise UserError("--overwrite has no effect without --out; leave it out.")
        if args.out is not None:
            check_new_file(args.out, ".yaml", ".yml", overwrite=args.overwrite)
        text = text_of(robot_spec(read(args.file, args.prefix), args), args.file.name)
        if args.out is not None:
            write_text(args.out, text)
        else:
            sys.stdout.write(text)
    except UserError as error:
        sys.stderr.write(f"import_urdf: error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
