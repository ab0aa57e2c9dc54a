"""Robot descriptions, one YAML file per robot: `robots/*.yaml` or a custom file.

Joints are listed in the order of commands; units are SI (rad, m, s, Nm, N). A missing limit is infinite, except for
velocity, which is required.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from robopolicy.deploy.safety.filter import FilterConfig
from robopolicy.deploy.safety.motion import Array, JointLimits
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_yaml
from robopolicy.schema import from_dict
from robopolicy_robots.messages import (
    CATALOGUE,
    Bool,
    CompressedImage,
    Float64MultiArray,
    Image,
    JointState,
    JointTrajectory,
    String,
)
from robopolicy_robots.transports.actions import FOLLOW_JOINT_TRAJECTORY
from robopolicy_robots.transports.base import COMMAND, IMAGE, LATCHED, MAX_DOMAIN, SENSOR, TOPIC, QoS, transport_names

SHIPPED = Path(__file__).parent / "robots"
QOS_PROFILES: dict[str, QoS] = {"sensor": SENSOR, "image": IMAGE, "command": COMMAND, "latched": LATCHED}
COMMAND_TYPES = (JointTrajectory.ros_name, Float64MultiArray.ros_name, JointState.ros_name, FOLLOW_JOINT_TRAJECTORY)
IMAGE_TYPES = (Image.ros_name, CompressedImage.ros_name)
JOINTS, CAMERA = "joints", "image."  # keys of sources
# {unit: largest plausible position and velocity}; larger values are probably in degrees or millimetres
PLAUSIBLE = {"rad": (8 * math.pi, 100.0), "m": (10.0, 10.0)}


@dataclass(frozen=True)
class Topic:
    """Topic name, message type and QoS."""

    topic: str  # "/joint_states"
    type: str  # "sensor_msgs/msg/JointState"
    qos: str = "sensor"  # key of QOS_PROFILES


@dataclass(frozen=True)
class Joint:
    """Commanded joint."""

    name: str
    velocity: float  # [rad/s or m/s]
    low: float = -math.inf  # [rad or m]
    high: float = math.inf
    acceleration: float = math.inf  # [rad/s^2 or m/s^2]
    jerk: float = math.inf  # [rad/s^3 or m/s^3]
    effort: float = math.inf  # [Nm or N] measured effort above which the motion stops
    home: float = 0.0  # [rad or m]
    unit: str = "rad"  # or m
    gripper: bool = False  # part of a gripper


@dataclass(frozen=True)
class Camera:
    """Camera and its topic."""

    name: str
    topic: str
    height: int  # [pixels]
    width: int
    type: str = "sensor_msgs/msg/Image"
    qos: str = "image"

    def __post_init__(self) -> None:
        if self.type not in IMAGE_TYPES:
            raise UserError(f"Camera '{self.name}': type must be one of {', '.join(IMAGE_TYPES)}, found '{self.type}'.")
        if not self.name or min(self.height, self.width) < 1:
            size = f"{self.height} x {self.width}"
            raise UserError(f"A camera needs a name and at least one pixel, found '{self.name}' of {size}.")


@dataclass(frozen=True)
class SafetyConfig:
    """Safety limits of the control loop, which cannot be disabled."""

    max_age: float = 0.1  # [s] maximum age of joint states and other small messages
    max_camera_age: float = 0.25  # [s] maximum age of images
    estop_after: float = 1.0  # [s] age that turns a hold into an emergency stop
    max_tracking_error: float = 0.5  # [rad or m] maximum distance between command and measurement
    max_initial_error: float = 0.5  # [rad or m] maximum distance of the first target from the robot
    max_limited_fraction: float = 0.5  # maximum fraction of limited commands within `window`
    window: float = 2.0  # [s]
    max_overruns: int = 5  # maximum consecutive late ticks
    heartbeat_timeout: float = 0.0  # [s] timeout of the operator's heartbeat; 0 for none
    margin: float = 0.002  # fraction of a joint's range kept free at either end
    max_lead: float = 0.25  # [s] maximum distance of a command from the robot, as time at full speed
    max_step: float = math.inf  # [rad or m] maximum change of a command per tick

    def __post_init__(self) -> None:
        for name in ("max_age", "max_camera_age", "estop_after", "max_tracking_error", "max_initial_error", "window"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"safety: {name} must be a positive number, got {getattr(self, name):g}.")
        if self.window > 60:
            raise UserError(f"safety: window must be at most 60 s, got {self.window:g}.")
        if not 0 <= self.heartbeat_timeout < math.inf:
            raise UserError(f"safety: heartbeat_timeout must be 0 (none) or positive, got {self.heartbeat_timeout:g}.")
        if not 0 < self.max_limited_fraction <= 1:
            raise UserError(f"safety: max_limited_fraction must lie in (0, 1], got {self.max_limited_fraction:g}.")
        if self.max_overruns < 1:
            raise UserError(f"safety: max_overruns must be at least 1, got {self.max_overruns}.")


@dataclass(frozen=True)
class RobotSpec:
    """Description of a robot and its connection."""

    name: str
    joints: tuple[Joint, ...]  # in the order of commands
    state: Topic  # a JointState with at least these joints, in any order
    command: Topic  # topic or action with a type in COMMAND_TYPES
    mode: str = "absolute"  # absolute: positions; velocity: velocities
    interpolate: bool = True  # interpolate between the targets of actions
    rate: float = 50.0  # [Hz] of the control loop
    command_timeout: float | None = None  # [s] time without commands after which the robot stops; None: unknown
    transport: str = "dds"  # key of `robopolicy_robots.transports`, or "auto"
    transport_options: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings by name of the transport
    domain: int | None = None  # ROS_DOMAIN_ID; None: from the environment, or 0
    simulated: bool = False  # simulated by `robopolicy_robots.simulated.node`
    estop: Topic = Topic("/estop", "std_msgs/msg/Bool", "latched")
    status: Topic = Topic("/robopolicy/status", "std_msgs/msg/String", "latched")
    heartbeat: Topic = Topic("/operator/heartbeat", "std_msgs/msg/Bool", "sensor")
    cameras: tuple[Camera, ...] = ()
    sources: dict[str, Topic] = field(default_factory=dict)  # further sources of the embodiment by key
    safety: SafetyConfig = SafetyConfig()

    def __post_init__(self) -> None:
        self._check_topics()
        if self.state.type != JointState.ros_name:
            raise UserError(f"{self.name}: state must be of type {JointState.ros_name}, found {self.state.type}.")
        if self.command.type not in COMMAND_TYPES:
            raise UserError(
                f"{self.name}: command must be one of {', '.join(COMMAND_TYPES)}, found {self.command.type}."
            )
        if self.uses_action and (self.mode != "absolute" or self.simulated):
            needed = "a topic, since the robot is simulated" if self.simulated else "mode: absolute"
            raise UserError(f"{self.name}: a command of type {FOLLOW_JOINT_TRAJECTORY} needs {needed}.")
        if not 0 < self.rate <= 2000:
            raise UserError(f"{self.name}: rate must lie in (0, 2000] Hz, got {self.rate:g}.")
        if self.command_timeout is not None and not 1.0 / self.rate < self.command_timeout < math.inf:
            raise UserError(
                f"{self.name}: command_timeout must be longer than a control period (1 / {self.rate:g} s) and finite, "
                f"got {self.command_timeout:g}."
            )
        for transport in (self.transport, *self.transport_options):
            if transport not in transport_names():
                raise UserError(f"{self.name}: {unknown_name('transport', transport, transport_names())}")
        if not all(isinstance(settings, Mapping) for settings in self.transport_options.values()):
            raise UserError(f"{self.name}: transport_options must have the form {{transport: {{setting: value}}}}.")
        if self.mode not in ("absolute", "velocity"):
            raise UserError(f"{self.name}: mode must be absolute or velocity, found '{self.mode}'.")
        if self.domain is not None and not 0 <= self.domain <= MAX_DOMAIN:
            raise UserError(f"{self.name}: domain must lie in [0, {MAX_DOMAIN}], got {self.domain}.")
        for joint in self.joints:
            _check_joint(joint, self.name)
        outside = ~self.limits.inside(self.home)
        if outside.any():
            raise UserError(f"{self.name}: home of '{self.names[int(np.argmax(outside))]}' is outside of its range.")
        _ = self.filter_config

    @property
    def uses_action(self) -> bool:
        """Whether commands are goals of a trajectory controller."""
        return self.command.type == FOLLOW_JOINT_TRAJECTORY

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the joints `(J,)`."""
        return tuple(joint.name for joint in self.joints)

    @property
    def dt(self) -> float:
        """Control period [s]."""
        return 1.0 / self.rate

    @property
    def home(self) -> Array:
        """Home position `(J,)`."""
        return self._column("home")

    @property
    def limits(self) -> JointLimits:
        """Limits of the joints."""
        columns = (self._column(name) for name in ("low", "high", "velocity", "acceleration", "jerk", "effort"))
        return JointLimits(self.names, *columns, units=tuple(joint.unit for joint in self.joints))

    def largest(self, distance: Array, allowed: float) -> str:
        """Text about the joint with the largest of the distances `(J,)`."""
        joint = self.joints[int(np.argmax(distance))]
        return f"{joint.name}: {distance.max():.3g} {joint.unit}, allowed {allowed:g} {joint.unit}"

    @property
    def filter_config(self) -> FilterConfig:
        """Settings of the safety filter."""
        safety = self.safety
        return FilterConfig(self.mode, safety.margin, safety.max_lead, safety.max_step)  # type: ignore[arg-type]

    def source(self, key: str) -> Topic:
        """Topic of a source: `joints`, `image.<camera>` or a key of `sources`; raises `UserError` for other keys."""
        known = self.readable_topics
        if key not in known:
            unknown = unknown_name("source", key, known, f"of robot {self.name}")
            raise UserError(f"{unknown} Add its topic to the robot's YAML file, under sources or cameras.")
        return known[key]

    @property
    def readable_topics(self) -> dict[str, Topic]:
        """Topics of all sources by key."""
        images = {CAMERA + camera.name: Topic(camera.topic, camera.type, camera.qos) for camera in self.cameras}
        return {JOINTS: self.state, **images, **self.sources}

    def deadline(self, key: str) -> float:
        """Maximum age [s] of a source."""
        return self.safety.max_camera_age if key.startswith(CAMERA) else self.safety.max_age

    def _check_topics(self) -> None:
        """Check names and types of topics, and that only sources share topics."""
        names = [camera.name for camera in self.cameras]
        if len(set(names)) != len(names):
            raise UserError(f"{self.name}: each camera needs a unique name, found {', '.join(names)}.")
        for key in self.sources:
            if key == JOINTS or key.startswith(CAMERA):
                section = "state" if key == JOINTS else "cameras"
                raise UserError(f"{self.name}: the source '{key}' belongs under {section}.")
        own = {"estop": self.estop, "heartbeat": self.heartbeat, "command": self.command, "status": self.status}
        for key, topic in (self.readable_topics | own).items():
            kinds = (*CATALOGUE, FOLLOW_JOINT_TRAJECTORY) if key == "command" else CATALOGUE
            _check_topic(topic, f"{self.name}: {key}", kinds)
        for key, kind in (("estop", Bool), ("heartbeat", Bool), ("status", String)):
            if own[key].type != kind.ros_name:
                raise UserError(f"{self.name}: {key} must be of type {kind.ros_name}, found {own[key].type}.")
        used: dict[str, str] = {}
        for key, topic in (self.readable_topics | own).items():  # only sources may share a topic
            other = used.setdefault(topic.topic, key)
            if other != key and key in own:
                raise UserError(f"{self.name}: {other} and {key} must be different topics, both are {topic.topic}.")

    def _column(self, name: str) -> Array:
        return np.array([getattr(joint, name) for joint in self.joints], np.float64)


def load_robot(name: str) -> RobotSpec:
    """Load a shipped robot by name ("franka_panda") or a YAML file; raises `UserError` if missing or invalid."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / f"{name}.yaml"
    if not path.is_file() and path.parent == SHIPPED:
        raise unknown_name("robot", name, robot_names())
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read the robot {path}: {error}.") from error
    try:
        return from_dict(RobotSpec, _completed(RobotSpec, data, path.name), path.name)
    except UserError as error:
        raise UserError(str(error) if path.name in str(error) else f"{path.name}: {error}") from error


def robot_names() -> tuple[str, ...]:
    """Names of shipped robots."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def _completed(cls: type[Any], data: Any, where: str) -> Any:
    """Fill `data` with the defaults of the dataclass `cls`; a missing required field is an error."""
    if not isinstance(data, Mapping):
        return data  # `from_dict` raises the error
    hints, full = get_type_hints(cls), dict(data)
    for entry in dataclasses.fields(cls):
        here = f"{where}.{entry.name}"
        if entry.name not in data:
            if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
                raise UserError(f"{here} is missing.")
            default = entry.default_factory() if entry.default is dataclasses.MISSING else entry.default  # type: ignore[misc]
            full[entry.name] = dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default  # type: ignore[arg-type]
            continue
        value, hint = data[entry.name], hints[entry.name]
        inner = next((each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)), None)
        if inner is None:
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            full[entry.name] = [_completed(inner, item, f"{here}[{i}]") for i, item in enumerate(value)]  # type: ignore[arg-type]
        elif dataclasses.is_dataclass(hint):
            full[entry.name] = _completed(inner, value, here)  # type: ignore[arg-type]
        elif isinstance(value, Mapping):
            full[entry.name] = {str(key): _completed(inner, item, f"{here}.{key}") for key, item in value.items()}  # type: ignore[arg-type]
    return full


def _check_joint(joint: Joint, where: str) -> None:
    if not joint.name:
        raise UserError(f"{where}: every joint needs a name.")
    if joint.unit not in PLAUSIBLE:
        raise UserError(f"{where}: the unit of a joint must be rad or m, found '{joint.unit}' of '{joint.name}'.")
    ends = [abs(end) for end in (joint.low, joint.high) if math.isfinite(end)]
    max_position, max_velocity = PLAUSIBLE[joint.unit]
    other = "degrees" if joint.unit == "rad" else "millimetres"
    position = (max(ends, default=0.0), max_position, joint.unit)
    for value, limit, unit in (position, (joint.velocity, max_velocity, f"{joint.unit}/s")):
        if limit < value < math.inf:
            raise UserError(f"{where}: {value:g} {unit} of '{joint.name}' is not plausible; was it meant in {other}?")


def _check_topic(topic: Topic, where: str, kinds: Collection[str]) -> None:
    if topic.type not in kinds:
        raise UserError(f"{where}: {unknown_name('message type', topic.type, kinds)}")
    if topic.qos not in QOS_PROFILES:
        raise UserError(f"{where}: {unknown_name('QoS', topic.qos, QOS_PROFILES)}")
    if not TOPIC.fullmatch(topic.topic):
        raise UserError(f"{where}: expected a topic such as '/arm/joint_states', found '{topic.topic}'.")
