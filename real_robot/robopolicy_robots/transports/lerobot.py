"""Transport to robots with the `Robot` interface of LeRobot (SO-100, SO-101, Koch, OpenArm and others).

A thread reads the observation of the robot at the control rate and publishes it in this process, on the topics of the
YAML file: joints as a JointState, cameras as Images. The newest command goes to `send_action`. LeRobot drivers
wait for their buses, so that thread may wait too; the control loop does not. A robot whose observation fails is silent,
which the watchdog sees.

LeRobot counts joints in degrees, or from -100 to 100 over the range that its calibration found, and grippers from 0 to
100; messages are in radians. Degrees are LeRobot's: 4095 to a turn of 4096 steps, so a quarter turn is off by 0.4 mrad.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import pkgutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from robopolicy.deploy.safety.motion import Array
from robopolicy.errors import UserError, unknown_name
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
CLOSING = 5.0  # [s] that a bus may take to answer
_domains = itertools.count(-1, -1)  # private domains of this process are negative


@dataclass(frozen=True)
class JointUnits:
    """Conversion of LeRobot joint numbers `(J,)` to SI units: `zero + scale * number`."""

    zero: Array
    scale: Array

    @classmethod
    def of(cls, robot: RobotSpec, units: str) -> Self:
        """Conversion for the joints of `robot`.

        Raises:
            UserError: The units are unknown, or need a range that a joint lacks.
        """
        if units not in UNITS:
            raise unknown_name("unit", units, UNITS)
        rows: list[tuple[float, float]] = []
        for joint in robot.joints:
            share = 100.0 if joint.gripper else 200.0  # 0 to 100, or -100 to 100
            if units == "radians":
                rows.append((0.0, 1.0))
            elif units == "degrees" and not joint.gripper:
                rows.append((0.0, np.pi / 180.0))
            elif np.isfinite(joint.high - joint.low):
                rows.append(
                    (joint.low if joint.gripper else (joint.low + joint.high) / 2.0, (joint.high - joint.low) / share)
                )
            else:
                raise UserError(
                    f"{robot.name}: LeRobot uses fractions of the range of '{joint.name}', which must be given."
                )
        zero, scale = np.array(rows).T
        return cls(zero, scale)

    def si(self, numbers: Array) -> Array:
        """Positions [rad, m]."""
        return self.zero + self.scale * numbers

    def lerobot(self, positions: Array) -> Array:
        """Joint numbers of LeRobot."""
        return (positions - self.zero) / self.scale


class LerobotTransport(WrappedTransport):
    """One robot of LeRobot, connected for as long as the transport is open.

    Args:
        robot: Description with the joint names of LeRobot motors.
        type: Robot type in LeRobot, such as so101_follower.
        units: Units of its joint numbers: degrees, range (-100 to 100) or radians.
        **settings: Of LeRobot's configuration: port, id, cameras `{name: {type: opencv, index_or_path: 0, ...}}`, ...

    Raises:
        UserError: A package is missing, or a setting is unknown.
        TransportError: The robot cannot be reached, is not calibrated, or has other joints.
    """

    module = "lerobot"
    extra = "lerobot"

    def __init__(self, robot: RobotSpec, type: str = "so101_follower", units: str = "degrees", **settings: Any) -> None:
        if robot.mode != "absolute":
            raise TransportError(f"LeRobot takes positions, and {robot.name} is driven by velocities.")
        domain, numbers = next(_domains), JointUnits.of(robot, units)
        self._driver = _Driver(robot, numbers, _connected(robot, type, units, settings), domain)
        super().__init__(LoopbackTransport(domain))

    def _leave(self) -> None:
        self._driver.close()
        super()._leave()


class _Driver:
    """Driver thread of the robot."""

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
        self._frames: dict[str, Any] = {}  # the newest picture of each camera
        self._obeyed = 0  # sequence of the newest command sent
        self._failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lerobot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect. LeRobot disables the torque unless configured otherwise."""
        self._stopping.set()
        self._thread.join(CLOSING)
        with contextlib.suppress(Exception):  # an unplugged cable
            self._device.disconnect()
        self._side.close()

    def _run(self) -> None:
        for _ in ticks(self._robot.dt, self._stopping, float("inf")):
            try:
                self._obey()
                self._report(self._device.get_observation())
                self._failing = False
            except Exception as error:  # of a bus, a camera or LeRobot: publish nothing until it works again
                if not self._failing:
                    log.warning("%s fails: %s", self._robot.name, error)
                self._failing = True

    def _obey(self) -> None:
        received = self._command.latest()
        if received is None or received.sequence == self._obeyed:
            return
        self._obeyed = received.sequence
        named, targets = targets_of(received.message, self._robot.names)
        if set(named) != set(self._robot.names) or not np.isfinite(targets).all():
            raise UserError(f"no command for {', '.join(self._robot.names)}")
        place = {name: i for i, name in enumerate(named)}
        numbers = self._units.lerobot(targets[[place[name] for name in self._robot.names]])
        self._device.send_action(
            {name + POSITION: float(number) for name, number in zip(self._robot.names, numbers, strict=True)}
        )

    def _report(self, seen: Mapping[str, Any]) -> None:
        stamp = Time.from_seconds(time.time())
        numbers = np.array([seen[name + POSITION] for name in self._robot.names], np.float64)
        for name, publisher in self._cameras.items():
            if seen[name] is not self._frames.get(name):  # LeRobot returns the last image until there is a new one
                self._frames[name] = seen[name]
                publisher.publish(Image.from_pixels(np.asarray(seen[name]), Header(stamp, name)))
        self._state.publish(JointState(Header(stamp), self._robot.names, self._units.si(numbers)))


def _connected(robot: RobotSpec, kind: str, units: str, settings: Mapping[str, Any]) -> Any:
    """LeRobot's robot, connected and calibrated."""
    robots = require("lerobot.robots", EXTRA)
    config = _config(robots.RobotConfig, "lerobot.robots", "robot of LeRobot", kind, settings)
    degrees = getattr(config, "use_degrees", None)
    counted = units if degrees is None else "degrees" if degrees else "range"
    if counted != units:  # the units would be wrong
        raise TransportError(f"{kind} uses {counted}, as set by use_degrees, not {units}; change one of them.")
    try:
        device = robots.make_robot_from_config(config)
        lacking = [name for name in robot.names if name + POSITION not in device.action_features]
        if lacking:
            found = ", ".join(key.removesuffix(POSITION) for key in device.action_features)
            raise TransportError(f"{kind} has no {', '.join(lacking)} of {robot.name}; it has {found}.")
        device.connect(calibrate=False)  # it would prompt on the terminal
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
    """A configuration of LeRobot by its registered name.

    Raises:
        UserError: The name is unknown, or a setting is unknown or missing.
    """
    known = _known(base, package, kind)
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


def _known(base: Any, package: str, kind: str) -> Mapping[str, Any]:
    """Configurations by name. They are registered on import of their module, which may need a driver package."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if kind in base.get_known_choices():
            break
        if module.ispkg:
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    return base.get_known_choices()
