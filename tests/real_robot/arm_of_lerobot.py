"""A test arm with LeRobot's interface, derived from LeRobot's base class if installed, else from a stand-in."""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


def stand_in() -> dict[str, ModuleType]:
    """Return stand-in modules for the robot and camera interfaces of `lerobot` 0.6 that the code uses."""

    class Choices:
        known: ClassVar[dict[str, Any]]

        def __init_subclass__(cls) -> None:
            if Choices in cls.__bases__:
                cls.known = {}

        @classmethod
        def register_subclass(cls, name: str) -> Any:
            return lambda config: cls.known.setdefault(name, config)

        @classmethod
        def get_known_choices(cls) -> dict[str, Any]:
            return cls.known

        @property
        def type(self) -> str:
            return next(name for name, config in self.known.items() if config is type(self))

    @dataclass(kw_only=True)
    class RobotConfig(Choices):
        id: str | None = None
        calibration_dir: Any = None

    @dataclass(kw_only=True)
    class CameraConfig(Choices):
        fps: int | None = None
        width: int | None = None
        height: int | None = None

    class Robot(ABC):
        config_class: Any
        name: str

        def __init__(self, config: Any) -> None:
            self.robot_type, self.id, self.calibration = self.name, config.id, {}

    for name in ("observation_features", "action_features", "is_connected", "is_calibrated"):
        setattr(Robot, name, property(abstractmethod(lambda self: None)))
    for name in ("connect", "calibrate", "configure", "get_observation", "send_action", "disconnect"):
        setattr(Robot, name, abstractmethod(lambda self, *_, **__: None))
    Robot.__abstractmethods__ = frozenset(dir(Robot)) & {
        *("observation_features", "action_features", "is_connected", "is_calibrated"),
        *("connect", "calibrate", "configure", "get_observation", "send_action", "disconnect"),
    }
    found = {name: ModuleType(name) for name in ("lerobot", "lerobot.robots", "lerobot.cameras")}
    for module in found.values():
        module.__path__ = []
    found["lerobot.robots"].__dict__.update(
        Robot=Robot,
        RobotConfig=RobotConfig,
        make_robot_from_config=lambda config: sys.modules[__name__].__dict__["arm_class"](config),
    )
    found["lerobot.cameras"].__dict__.update(CameraConfig=CameraConfig)
    return found


def define(robots: Any, cameras: Any) -> type:
    """Return the arm class and register its configurations with LeRobot or the stand-in."""

    @robots.RobotConfig.register_subclass("still_arm")
    @dataclass(kw_only=True)
    class StillArmConfig(robots.RobotConfig):
        port: str
        use_degrees: bool = True
        calibrated: bool = True
        reachable: bool = True
        cameras: dict[str, Any] = field(default_factory=dict)

    @cameras.CameraConfig.register_subclass("grey")
    @dataclass(kw_only=True)
    class GreyConfig(cameras.CameraConfig):
        shade: int = 0

    class StillArm(robots.Robot):
        """An arm that reaches every commanded position at once, in LeRobot's units."""

        config_class, name = StillArmConfig, "still_arm"
        made: ClassVar[list[Any]] = []

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.config, self.at = config, dict.fromkeys(MOTORS, 0.0)
            self.up = self.broken = False
            self.actions: list[dict[str, float]] = []
            self.frames = {
                name: np.full((camera.height, camera.width, 3), camera.shade, np.uint8)
                for name, camera in config.cameras.items()
            }
            self.made.append(self)

        @property
        def observation_features(self) -> dict[str, Any]:
            return {**self.action_features, **{name: frame.shape for name, frame in self.frames.items()}}

        @property
        def action_features(self) -> dict[str, Any]:
            return {f"{motor}.pos": float for motor in MOTORS}

        @property
        def is_connected(self) -> bool:
            return self.up

        def connect(self, calibrate: bool = True) -> None:
            assert not calibrate, "it would ask questions on the terminal"
            if not self.config.reachable:
                raise ConnectionError(f"Could not open {self.config.port}\n(nobody there)")
            self.up = True

        @property
        def is_calibrated(self) -> bool:
            return self.config.calibrated

        def calibrate(self) -> None:
            raise AssertionError("nobody asked for it")

        def configure(self) -> None:
            pass

        def get_observation(self) -> dict[str, Any]:
            if self.broken or not self.up:
                raise ConnectionError("Incorrect status packet!")
            return {**{f"{motor}.pos": value for motor, value in self.at.items()}, **self.frames}

        def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
            assert set(action) == set(self.action_features) and all(type(value) is float for value in action.values())
            self.actions.append(action)
            self.at = {key.removesuffix(".pos"): value for key, value in action.items()}
            return action

        def disconnect(self) -> None:
            self.up = False

    return StillArm
