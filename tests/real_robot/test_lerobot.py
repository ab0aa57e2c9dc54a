"""Tests of the LeRobot transport: units, joints, cameras and failures, with LeRobot's own classes if installed."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import arm_of_lerobot
import numpy as np
import pytest
from networks import until

from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec
from robopolicy_robots.embodiment import JointEmbodiment
from robopolicy_robots.loop import ControlLoop, LoopOptions
from robopolicy_robots.messages import Bool, Float64MultiArray, Image, JointState, JointTrajectory, JointTrajectoryPoint
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.robot import Camera, Joint, RobotSpec, Topic, load_robot
from robopolicy_robots.transports.base import COMMAND, IMAGE, LATCHED, SENSOR, TransportError, open_transport
from robopolicy_robots.transports.lerobot import JointUnits

ARM: dict[str, Any] = {"type": "still_arm", "port": "/dev/null"}
DEGREES = np.array([90.0, -45.0, 180.0 / np.pi, 0.0, -180.0, 50.0])


@pytest.fixture(params=["stand-in", "lerobot"])
def arm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class of an arm registered with LeRobot; its `made` holds the created instances."""
    if request.param == "lerobot":
        pytest.importorskip("lerobot", reason="run: make test-lerobot")
    else:
        for name, module in arm_of_lerobot.stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    robots, cameras = (importlib.import_module(f"lerobot.{name}") for name in ("robots", "cameras"))
    for choices, name in ((robots.RobotConfig, "still_arm"), (cameras.CameraConfig, "grey")):
        getattr(choices, "_choice_registry", {}).pop(name, None)
    found = arm_of_lerobot.define(robots, cameras)
    monkeypatch.setattr(arm_of_lerobot, "arm_class", found, raising=False)
    if request.param == "lerobot":  # which looks up a class by name in the module globals of its configuration
        monkeypatch.setattr(arm_of_lerobot, "StillArm", found, raising=False)
    yield found


def so101(**changes: Any) -> RobotSpec:
    return replace(load_robot("so101"), rate=200.0, **changes)


def test_degrees_convert_to_radians_and_the_gripper_to_a_fraction_of_its_range() -> None:
    robot = so101()
    units = JointUnits.of(robot, "degrees")
    grip = robot.joints[5]
    wanted = [np.pi / 2, -np.pi / 4, 1.0, 0.0, -np.pi, (grip.low + grip.high) / 2]
    np.testing.assert_allclose(units.si(DEGREES), wanted, rtol=0, atol=1e-15)
    np.testing.assert_allclose(units.lerobot(units.si(DEGREES)), DEGREES, rtol=0, atol=1e-13)


def test_range_units_convert_to_the_joint_limits() -> None:
    robot = so101()
    units, limits = JointUnits.of(robot, "range"), robot.limits
    lowest, highest = np.array([-100.0] * 5 + [0.0]), np.full(6, 100.0)
    np.testing.assert_allclose(units.si(lowest), limits.position_low, rtol=0, atol=1e-15)
    np.testing.assert_allclose(units.si(highest), limits.position_high, rtol=0, atol=1e-15)
    np.testing.assert_allclose(units.lerobot(limits.position_high), highest, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(JointUnits.of(robot, "radians").si(DEGREES), DEGREES)


def test_invalid_units_are_refused() -> None:
    with pytest.raises(UserError, match=r"Unknown unit 'degree'\. Did you mean 'degrees'"):
        JointUnits.of(so101(), "degree")
    endless = so101(joints=(*so101().joints[:5], Joint("gripper", 1.0, gripper=True)))
    with pytest.raises(UserError, match="LeRobot units need the range of 'gripper'"):
        JointUnits.of(endless, "degrees")


def test_states_and_commands_are_in_radians(arm: Any) -> None:
    robot = so101()
    with open_transport("lerobot", robot=robot, id="one", **ARM) as transport:
        states = transport.subscribe(robot.state.topic, JointState, SENSOR)
        commands = transport.advertise(robot.command.topic, JointTrajectory, COMMAND)
        estop = transport.subscribe("/estop", Bool, LATCHED)
        first = until(states.latest)
        assert (commands.matched, states.publishers, estop.publishers) == (1, 1, 0) and estop.latest() is None
        assert first.message.name == robot.names and first.stamp is not None
        np.testing.assert_allclose(first.message.position, [0, 0, 0, 0, 0, robot.joints[5].low])
        turned = np.array([0.5, -0.25, 0.125, 1.0, -1.5, 0.0])
        order = [5, 4, 3, 2, 1, 0]  # joints are matched by name, not by index
        point = JointTrajectoryPoint(turned[order])
        commands.publish(JointTrajectory(joint_names=tuple(robot.names[i] for i in order), points=(point,)))
        (device,) = arm.made
        sent = until(lambda: device.actions and device.actions[-1])
        np.testing.assert_allclose([sent[f"{name}.pos"] for name in robot.names[:5]], np.rad2deg(turned[:5]))
        assert sent["gripper.pos"] == pytest.approx(100 * 0.174533 / (0.174533 + 1.74533))
        until(lambda: np.allclose(states.latest().message.position, turned))
        assert len(device.actions) == 1  # a command is sent once
    assert not device.up


def test_commands_of_the_wrong_size_or_with_nan_are_not_sent(arm: Any) -> None:
    robot = so101(command=Topic("/commands", Float64MultiArray.ros_name, "command"))
    with open_transport("lerobot", robot=robot, **ARM) as transport:
        states = transport.subscribe(robot.state.topic, JointState, SENSOR)
        commands = transport.advertise("/commands", Float64MultiArray, COMMAND)
        for numbers in (np.zeros(5), np.full(6, np.nan)):
            commands.publish(Float64MultiArray(data=numbers))
            before = until(states.latest).sequence
            until(lambda b=before: states.latest().sequence > b + 3)
        assert arm.made[0].actions == []
        commands.publish(Float64MultiArray(data=np.full(6, 0.1)))
        until(lambda: arm.made[0].actions)


def test_a_camera_frame_is_delivered_once(arm: Any) -> None:
    robot = so101(cameras=(Camera("front", "/front", 4, 6), Camera("absent", "/absent", 4, 6)))
    camera = {"type": "grey", "shade": 7, "width": 6, "height": 4, "fps": 30}
    with open_transport("lerobot", robot=robot, cameras={"front": camera}, **ARM) as transport:
        front = transport.subscribe("/front", Image, IMAGE)
        states = transport.subscribe(robot.state.topic, JointState, SENSOR)
        until(states.latest)
        device = arm.made[0]
        device.frames["front"] = np.full((4, 6, 3), (1, 2, 3), np.uint8)
        until(lambda: (seen := front.latest()) and (seen.message.pixels == (1, 2, 3)).all())
        sequence, begun = front.latest().sequence, states.latest().sequence
        until(lambda: states.latest().sequence > begun + 3)
        assert front.latest().sequence == sequence and front.latest().message.encoding == "rgb8"
        assert transport.subscribe("/absent", Image, IMAGE).publishers == 0


def test_a_failing_robot_publishes_nothing_until_it_recovers(arm: Any, caplog: Any) -> None:
    robot = so101()
    with open_transport("lerobot", robot=robot, **ARM) as transport:
        states = transport.subscribe(robot.state.topic, JointState, SENSOR)
        until(states.latest)
        device = arm.made[0]
        device.broken = True
        until(lambda: "so101 failed: Incorrect status packet!" in caplog.text)
        before = states.latest().sequence
        assert states.latest().sequence == before
        device.broken = False
        until(lambda: states.latest().sequence > before)
    assert caplog.text.count("so101 failed") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "still_ar"}, "Unknown robot of LeRobot 'still_ar'. Did you mean 'still_arm'"),
        ({"prt": "/dev/null"}, "Unknown setting 'prt' of still_arm. Did you mean 'port'"),
        ({"port": None, "reachable": False}, r"LeRobot cannot reach still_arm: Could not open None \(nobody there\)"),
        ({"calibrated": False, "id": "one"}, "run: lerobot-calibrate --robot.type=still_arm --robot.port=/dev/null --"),
        ({"units": "range"}, "still_arm uses degrees, as set by use_degrees, not range"),
        ({"use_degrees": False}, "still_arm uses range, as set by use_degrees, not degrees"),
        ({"cameras": {"front": {"fps": 3}}}, "The camera 'front' needs a type"),
        ({"cameras": {"front": {"type": "gray"}}}, "Unknown camera of LeRobot 'gray'. Did you mean 'grey'"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(arm: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        open_transport("lerobot", robot=so101(), **(ARM | settings))
    assert "\n" not in str(refusal.value)
    assert not any(device.up for device in arm.made)


def test_other_joints_are_refused(arm: Any) -> None:
    with pytest.raises(TransportError, match=r"still_arm lacks the joints panda_joint1, .*; it has shoulder_pan, "):
        open_transport("lerobot", robot=load_robot("franka_panda"), **ARM)
    with pytest.raises(TransportError, match="has velocity commands"):
        open_transport("lerobot", robot=so101(mode="velocity"), **ARM)


def test_without_lerobot_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    monkeypatch.delitem(sys.modules, "lerobot.robots", raising=False)
    with pytest.raises(UserError, match=r"needs the package 'lerobot'; run: pip install 'robopolicy\[lerobot\]'"):
        open_transport("lerobot", robot=so101(), **ARM)


def test_so101_is_found_in_lerobot(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("lerobot", reason="run: make test-lerobot")
    robots = importlib.import_module("lerobot.robots")
    asked: list[Any] = []

    def refuse(config: Any) -> Any:
        asked.append(config)
        raise ConnectionError("no such port")

    monkeypatch.setattr(robots, "make_robot_from_config", refuse)
    settings: dict[str, Any] = {"port": "/dev/null", "calibration_dir": str(tmp_path)}
    settings["cameras"] = {"front": {"type": "opencv", "index_or_path": 0, "width": 640, "height": 480, "fps": 30}}
    with pytest.raises(TransportError, match="LeRobot cannot reach so101_follower: no such port"):
        open_transport("lerobot", robot=so101(), **settings)
    assert asked[0].type in ("so101_follower", "so100_follower") and asked[0].cameras["front"].fps == 30
    assert asked[0].use_degrees and asked[0].calibration_dir == tmp_path


def test_units_match_the_lerobot_motor_bus() -> None:
    """Servo steps pass through LeRobot's own conversion, for a range of half a turn around step 2048."""
    motors = pytest.importorskip("lerobot.motors.motors_bus", reason="run: make test-lerobot")
    bus = SimpleNamespace(
        calibration={"m": motors.MotorCalibration(id=1, drive_mode=0, homing_offset=0, range_min=1024, range_max=3072)},
        apply_drive_mode=True,
        model_resolution_table={"sts3215": 4096},
        _id_to_name=lambda _: "m",
        _id_to_model=lambda _: "sts3215",
    )
    normalize = next(each._normalize for each in vars(motors).values() if hasattr(each, "_normalize"))
    joint = Joint("m", 1.0, -np.pi / 2, np.pi / 2)
    for units, mode, exact in (("degrees", "DEGREES", 4e-4), ("range", "RANGE_M100_100", 1e-12)):
        bus.motors = {"m": motors.Motor(1, "sts3215", motors.MotorNormMode[mode])}
        for steps in (1024, 1500, 2048, 3072):
            number = np.array([normalize(bus, {1: steps})[1]])
            found = JointUnits.of(so101(joints=(joint,)), units).si(number)
            assert found == pytest.approx((steps - 2048) * 2 * np.pi / 4096, abs=exact)
    bus.motors = {"m": motors.Motor(1, "sts3215", motors.MotorNormMode.RANGE_0_100)}
    grip = replace(joint, gripper=True)
    number = np.array([normalize(bus, {1: 1500})[1]])
    assert JointUnits.of(so101(joints=(grip,)), "degrees").si(number) == pytest.approx((1500 - 2048) * 2 * np.pi / 4096)


class Reach:
    """A policy that targets one pose; any object with these members is a policy."""

    spec, takes_prefix = PolicySpec({"state": (6,)}, action_dim=6, horizon=8, action_horizon=4), False
    goal = np.array([0.3, -0.2, 0.25, 0.1, -0.4, 0.2])

    def chunk(self, obs: Any, prefix: Any = None) -> Any:
        return np.repeat(self.goal[None], 8, axis=0)

    def close(self) -> None:
        """Nothing to close."""


def test_a_lerobot_arm_is_driven_within_its_limits(arm: Any) -> None:
    """The control loop reads radians, filters the actions of a policy and sends degrees within the limits."""
    robot, ticks = so101(), []
    with open_transport("lerobot", robot=robot, **ARM) as transport:
        parts = LoopOptions(on_tick=ticks.append)
        loop = ControlLoop(robot, transport, JointEmbodiment(robot.names, 0.05), PolicyRunner(Reach()), parts)
        loop.arm()
        loop.run(seconds=1.5)
        sent = [[action[f"{name}.pos"] for name in robot.names] for action in arm.made[0].actions]
    commanded = np.array([tick.command for tick in ticks if tick.command is not None])
    assert loop.log.counts["velocity"] > 0  # the policy jumps
    assert (np.abs(np.diff(commanded, axis=0)) <= robot.limits.velocity * robot.dt * (1 + 1e-9)).all()
    assert robot.limits.inside(commanded, 1e-9).all()
    taken = JointUnits.of(robot, "degrees").si(np.array(sent))  # the newest commands, not necessarily all
    np.testing.assert_allclose(taken[-1], Reach.goal, atol=1e-3)
    assert len(taken) > 20 and np.abs(taken[:-6, None] - commanded).max(axis=2).min(axis=1).max() < 1e-9
