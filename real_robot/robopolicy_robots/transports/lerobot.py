"""Transport to robots with the `Robot` interface of LeRobot (SO-100, SO-101, Koch, OpenArm and others).

A thread reads observations at the control rate, publishes them in this process on the topics of the YAML file (joints
as a JointState, cameras as Images), and passes the newest command to `send_action`. LeRobot drivers may block this
thread, but not the control loop. Nothing is published while observations fail, so the watchdog detects it.

LeRobot measures joints in degrees, or from -100 to 100 over the calibrated range, and grippers from 0 to 100; messages
are in radians. LeRobot maps 4095 of 4096 steps to a full turn, so a quarter turn has an error of 0.4 mrad.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from robopolicy.deploy.safety.motion import Array
from robopolicy.errors import UserError, unknown_name
from robopolicy.interop.lerobot.choices import config_choices
from robopolicy.optional import require
from robopolicy_robots.commands import targets_of
from robopolicy_robots.messages import CATALOGUE, Header, Image, JointState, Time
from robopolicy_robots.rate import ticks
from robopolicy_robots.robot import QOS_PROFILES, RobotSpec
from robopolicy_robots.transports.base import Publisher, TransportError
from robopolicy_robots.transports.loopback import LoopbackTransport
from robopolicy_robots.transports.wrapped import WrappedTransport

log = logging.getLogger(__name__)
EXTRA = "lerobot"
POSITION = ".pos"  # suffix of joint names in LeRobot
UNITS = ("degrees", "range", "radians")  # units of joint positions in LeRobot
CLOSE_TIMEOUT = 5.0  # [s] maximum time of the last bus access
_domains = itertools.count(-1, -1)  # private domains of this process are negative


@dataclass(frozen=True)
class JointUnits:
    """Conversion from joint numbers `(J,)` of LeRobot to SI units: `zero + scale * number`."""

    zero: Array
    scale: Array

    @classmethod
    def of(cls, robot: RobotSpec, units: str) -> Self:
        """Create the conversion for `robot`; raises `UserError` for unknown units or a missing range."""
        if units not in UNITS:
            raise unknown_name("unit", units, UNITS)
        rows: list[tuple[float, float]] = []
        for joint in robot.joints:
            width = 100.0 if joint.gripper else 200.0  # 0 to 100, or -100 to 100
            if units == "radians":
                rows.append((0.0, 1.0))
            elif units == "degrees" and not joint.gripper:
                rows.append((0.0, np.pi / 180.0))
            elif np.isfinite(joint.high - joint.low):
                zero = joint.low if joint.gripper else (joint.low + joint.high) / 2.0
                rows.append((zero, (joint.high - joint.low) / width))
            else:
                raise UserError(f"{robot.name}: LeRobot units need the range of '{joint.name}'; set low and high.")
        zero, scale = np.array(rows).T
        return cls(zero, scale)

    def si(self, numbers: Array) -> Array:
        """Positions [rad, m]."""
        return self.zero + self.scale * numbers

    def lerobot(self, positions: Array) -> Array:
        """Joint numbers of LeRobot."""
        return (positions - self.zero) / self.scale


class LerobotTransport(WrappedTransport):
    """LeRobot robot, connected while the transport is open.

    Args:
        robot: Robot description with the joint names of the LeRobot motors.
        type: Robot type in LeRobot, such as so101_follower.
        units: Units of joint numbers: degrees, range (-100 to 100) or radians.
        **settings: Configuration in LeRobot: port, id, cameras `{name: {type: opencv, index_or_path: 0, ...}}`, ...

    Raises:
        UserError: A package is missing, or a setting is unknown.
        TransportError: The robot cannot be reached, is not calibrated, or has other joints.
    """

    module = "lerobot"
    extra = "lerobot"

    def __init__(self, robot: RobotSpec, type: str = "so101_follower", units: str = "degrees", **settings: Any) -> None:
        if robot.mode != "absolute":
            raise TransportError(f"LeRobot requires position commands, but {robot.name} has velocity commands.")
        domain, numbers = next(_domains), JointUnits.of(robot, units)
        self._driver = _Driver(robot, numbers, _connected(robot, type, units, settings), domain)
        super().__init__(LoopbackTransport(domain))

    def _leave(self) -> None:
        self._driver.close()
        super()._leave()


class _Driver:
    """Thread that connects the robot to topics."""

    def __init__(self, robot: RobotSpec, units: JointUnits, device: Any, domain: int) -> None:
        self._robot, self._units, self._device = robot, units, device
        self._side = LoopbackTransport(domain)
        state, command = robot.state, robot.command
        self._state = self._side.advertise(state.topic, JointState, QOS_PROFILES[state.qos])
        self._command = self._side.subscribe(command.topic, CATALOGUE[command.type], QOS_PROFILES[command.qos])
        self._cameras: dict[str, Publisher[Image]] = {
            camera.name: self._side.advertise(camera.topic, Image, QOS_PROFILES[camera.qos])
            for camera in robot.cameras
            if camera.type == Image.ros_name and camera.name in device.observation_features
        }
        self._frames: dict[str, Any] = {}  # newest image of each camera
        self._last_command = 0  # sequence of the newest command sent
        self._failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lerobot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect. LeRobot disables the torque unless configured otherwise."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT)
        with contextlib.suppress(Exception):  # the cable may be unplugged
            self._device.disconnect()
        self._side.close()

    def _run(self) -> None:
        for _ in ticks(self._robot.dt, self._stopping, float("inf")):
            try:
                self._send_command()
                self._publish(self._device.get_observation())
                self._failing = False
            except Exception as error:  # of a bus, a camera or LeRobot; nothing is published until it works again
                if not self._failing:
                    log.warning("%s failed: %s", self._robot.name, error)
                self._failing = True

    def _send_command(self) -> None:
        received = self._command.latest()
        if received is None or received.sequence == self._last_command:
            return
        self._last_command = received.sequence
        names = self._robot.names
        found, targets = targets_of(received.message, names)
        if set(found) != set(names) or not np.isfinite(targets).all():
            raise UserError(f"expected a finite command for {', '.join(names)}")
        index = {name: i for i, name in enumerate(found)}
        numbers = self._units.lerobot(targets[[index[name] for name in names]])
        self._device.send_action({name + POSITION: float(x) for name, x in zip(names, numbers, strict=True)})

    def _publish(self, observation: Mapping[str, Any]) -> None:
        stamp = Time.from_seconds(time.time())
        numbers = np.array([observation[name + POSITION] for name in self._robot.names], np.float64)
        for name, publisher in self._cameras.items():
            if observation[name] is not self._frames.get(name):  # LeRobot repeats an image until a new one arrives
                self._frames[name] = observation[name]
                publisher.publish(Image.from_pixels(np.asarray(observation[name]), Header(stamp, name)))
        self._state.publish(JointState(Header(stamp), self._robot.names, self._units.si(numbers)))


def _connected(robot: RobotSpec, kind: str, units: str, settings: Mapping[str, Any]) -> Any:
    """Connect a LeRobot robot and check its calibration."""
    robots = require("lerobot.robots", EXTRA)
    config = _config(robots.RobotConfig, "lerobot.robots", "robot of LeRobot", kind, settings)
    degrees = getattr(config, "use_degrees", None)
    configured = units if degrees is None else "degrees" if degrees else "range"
    if configured != units:
        raise TransportError(f"{kind} uses {configured}, as set by use_degrees, not {units}; change one of them.")
    try:
        device = robots.make_robot_from_config(config)
        missing = [name for name in robot.names if name + POSITION not in device.action_features]
        if missing:
            found = ", ".join(key.removesuffix(POSITION) for key in device.action_features)
            raise TransportError(f"{kind} lacks the joints {', '.join(missing)} of {robot.name}; it has {found}.")
        device.connect(calibrate=False)  # calibration would prompt on the terminal
    except TransportError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TransportError(f"LeRobot cannot reach {kind}: {reason}") from error
    if not device.is_calibrated:
        device.disconnect()
        known = "".join(f" --robot.{key}={settings[key]}" for key in ("port", "id") if key in settings)
        raise TransportError(f"{kind} is not calibrated; run: lerobot-calibrate --robot.type={kind}{known}")
    return device


def _config(base: Any, package: str, what: str, kind: str, settings: Mapping[str, Any]) -> Any:
    """Create a LeRobot configuration; raises `UserError` for unknown names and wrong settings."""
    known = config_choices(base, package, kind)
    if kind not in known:
        raise unknown_name(what, kind, known)
    config = known[kind]
    entries = [entry.name for entry in fields(config) if entry.init]
    for setting in settings:
        if setting not in entries:
            raise unknown_name("setting", setting, entries, f"of {kind}")
    values = dict(settings)
    if isinstance(values.get("cameras"), Mapping):
        cameras = require("lerobot.cameras", EXTRA).CameraConfig
        values["cameras"] = {
            name: _config(cameras, "lerobot.cameras", "camera of LeRobot", *_named(name, camera))
            for name, camera in values["cameras"].items()
        }
    if values.get("calibration_dir") is not None:
        values["calibration_dir"] = Path(values["calibration_dir"])
    try:
        return config(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind}: {' '.join(str(error).split())}") from error


def _named(name: str, camera: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(camera, Mapping) or "type" not in camera:
        raise UserError(f"The camera '{name}' needs a type, such as {{type: opencv, index_or_path: 0, fps: 30, ...}}.")
    return str(camera["type"]), {key: value for key, value in camera.items() if key != "type"}
