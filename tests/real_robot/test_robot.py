"""Tests of robot descriptions: shipped ones are plausible, invalid ones are refused in a line naming the field."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy.resources import folder
from robopolicy_robots.robot import SHIPPED, load_robot, robot_names

MINIMAL = """
name: one
joints:
  - {name: hinge, low: -1, high: 1, velocity: 2}
state: {topic: /joint_states, type: sensor_msgs/msg/JointState}
command: {topic: /commands, type: std_msgs/msg/Float64MultiArray}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_all_robots_are_shipped() -> None:
    assert robot_names() == (
        *("aloha", "franka_fr3", "franka_panda", "sim_go1", "sim_panda", "so100", "so101", "unitree_go2", "ur5e"),
    )


@pytest.mark.parametrize("name", robot_names())
def test_shipped_robots_are_plausible(name: str) -> None:
    robot = load_robot(name)
    assert robot.name == name and len(robot.joints) >= 6
    limits = robot.limits
    assert np.isfinite(limits.position_low).all() and np.isfinite(limits.position_high).all()
    metres = np.array([joint.unit == "m" for joint in robot.joints])
    assert (limits.position_high - limits.position_low)[metres].max(initial=0.0) < 0.2
    assert (np.abs(limits.position_low[~metres]) <= 6.3).all() and (np.abs(limits.position_high[~metres]) <= 6.3).all()
    fastest = 100.0 if name == "sim_go1" else 31.0  # its commands are set points of soft springs, not joint positions
    assert (limits.velocity <= fastest).all() and (limits.velocity >= 0.1).all()
    assert limits.inside(robot.home).all()
    # A motor with its full torque reaches full speed within a few control periods, not within hundreds.
    finite = np.isfinite(limits.acceleration)
    assert (limits.velocity[finite] / limits.acceleration[finite] < 2.0).all()


def test_descriptions_are_packaged() -> None:
    assert (SHIPPED / "__init__.py").is_file()  # setuptools includes YAML files of packages only


@pytest.mark.parametrize("name", robot_names())
def test_shipped_robots_cite_their_sources(name: str) -> None:
    text = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8")
    head = text[: text.index("name:")]
    assert head.startswith("#") and ("Limits" in head or "Positions" in head)


@pytest.mark.parametrize("name", ["sim_panda", "franka_panda"])
def test_pandas_agree_with_the_model(name: str) -> None:
    robot = load_robot(name)
    root = ElementTree.parse(folder("sim_assets") / "panda.xml").getroot()
    default = next(node for node in root.iter("default") if node.get("class") == "panda")
    usual = str(default.find("joint").get("range"))  # type: ignore[union-attr]
    ranges = {str(joint.get("name")): joint.get("range", usual) for joint in root.iter("joint") if joint.get("name")}
    for i in range(7):
        low, high = map(float, ranges[f"joint{i + 1}"].split())
        assert (robot.joints[i].low, robot.joints[i].high) == (low, high)
    assert robot.joints[7].high == 0.04 and robot.joints[7].unit == "m" and robot.joints[7].gripper
    np.testing.assert_array_equal(robot.limits.velocity[:7], [2.175] * 4 + [2.61] * 3)
    np.testing.assert_array_equal(robot.limits.effort[:7], [87] * 4 + [12] * 3)


def test_limits_of_other_robots_match_known_values() -> None:
    ur5e, go2, fr3 = load_robot("ur5e"), load_robot("unitree_go2"), load_robot("franka_fr3")
    np.testing.assert_allclose(ur5e.limits.velocity, np.pi, rtol=1e-5)
    assert ur5e.limits.effort.tolist() == [150, 150, 150, 28, 28, 28]
    assert go2.names[:3] == ("FL_hip_joint", "FL_thigh_joint", "FL_calf_joint") and len(go2.joints) == 12
    np.testing.assert_array_equal(fr3.limits.acceleration[:7], 10.0)
    assert len(load_robot("aloha").joints) == 14


def test_defaults_and_sources(tmp_path: Path) -> None:
    cameras = "cameras:\n  - {name: front, topic: /front, height: 48, width: 64}\n"
    sources = "sources:\n  imu: {topic: /imu, type: sensor_msgs/msg/Imu}\nsafety: {max_age: 0.2}\n"
    robot = load_robot(written(tmp_path, MINIMAL + cameras + sources))
    assert robot.dt == 0.02 and robot.command_timeout is None and robot.estop.qos == "latched"
    assert robot.limits.jerk.tolist() == [np.inf]
    assert robot.source("image.front").qos == "image" and robot.source("joints") == robot.state
    assert robot.source("imu").topic == "/imu"
    assert (robot.deadline("imu"), robot.deadline("image.front")) == (0.2, 0.25)
    with pytest.raises(UserError, match=r"Unknown source 'image.fron' of robot one. Did you mean 'image.front'"):
        robot.source("image.fron")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "velocity: 2",
            "velocity: fast",
            r"mine.yaml.joints\[0\].velocity must be a value of type float, found 'fast'",
        ),
        (", velocity: 2", "", r"mine.yaml.joints\[0\].velocity is missing"),
        ("low: -1", "lo: -1", r"Unknown setting 'lo' in mine.yaml.joints\[0\]. Did you mean 'low'"),
        ("low: -1", "low: 2", "mine.yaml: Limits of joint 'hinge': 'position_low' must be below"),
        ("velocity: 2", "velocity: .inf", "mine.yaml: Limits of joint 'hinge': 'velocity' must be known"),
        ("velocity: 2", "velocity: 2, home: 3", "mine.yaml: one: home of 'hinge' is outside"),
        ("velocity: 2", "velocity: 2, unit: deg", "mine.yaml: one: the unit of a joint must be rad or m"),
        ("name: one", "name: one\nrate: 0", r"mine.yaml: one: rate must lie in \(0, 2000\]"),
        ("name: one", "name: one\nmode: torque", "mine.yaml: one: mode must be absolute or velocity"),
        ("name: one", "name: one\ncommand_timeout: 0.001", "command_timeout must be longer than a control period"),
        ("/joint_states", "joint_states", "joints: expected a topic such as '/arm/joint_states', found 'joint_states'"),
        ("msg/JointState", "msg/JointStat", "Unknown message type 'sensor_msgs/msg/JointStat'. Did you mean"),
        ("std_msgs/msg/Float64MultiArray", "std_msgs/msg/Bool", "command must be one of"),
        ("name: one", "name: [", "Cannot read the robot .*mine.yaml"),
        ("name: one", "name: one\nsafety: {margin: 0.6}", "needs 0 <= margin < 0.5"),
        ("name: one", "name: one\nsafety: {max_age: .nan}", "safety: max_age must be a positive number, got nan"),
        (
            "name: one",
            "name: one\nsafety: {estop_after: .inf}",
            "safety: estop_after must be a positive number, got inf",
        ),
        (
            "name: one",
            "name: one\nsafety: {max_tracking_error: .nan}",
            "safety: max_tracking_error must be a positive number, got nan",
        ),
        (
            "name: one",
            "name: one\nsafety: {max_initial_error: -1}",
            "safety: max_initial_error must be a positive number",
        ),
        ("name: one", "name: one\nsafety: {window: 100}", "safety: window must be at most 60 s"),
        (
            "name: one",
            "name: one\nsafety: {max_limited_fraction: 2}",
            r"safety: max_limited_fraction must lie in \(0, 1\]",
        ),
        ("name: one", "name: one\nsafety: {max_overruns: 0}", "safety: max_overruns must be at least 1"),
        ("name: one", "name: one\nsafety: {heartbeat_timeout: .nan}", "safety: heartbeat_timeout must be 0"),
        ("name: one", "name: one\ndomain: 233", r"domain must lie in \[0, 232\], got 233"),
        ("name: one", "name: one\ncommand_timeout: .inf", "and finite, got inf"),
        ("low: -1", "low: .nan", "Limits of joint 'hinge': 'position_low' must be a number, got nan"),
        (
            "low: -1, high: 1",
            "low: -166, high: 166",
            "166 rad of 'hinge' is not plausible; was it meant in degrees",
        ),
        ("velocity: 2", "velocity: 150", "150 rad/s of 'hinge' is not plausible"),
        ("high: 1", "high: 40, unit: m", "40 m of 'hinge' is not plausible; was it meant in millimetres"),
        ("velocity: 2", f"velocity: {10**400}", "must be a number that a float can hold"),
        ("velocity: 2", "velocity: 2, velocity: 3", "found 'velocity' twice"),
        ("velocity: 2}", "velocity: 2}\n  - {name: hinge, velocity: 2}", "each name once, got 'hinge' twice"),
        ("name: hinge", "name: ''", "every joint needs a name"),
        ("name: one", "name: one\n? [a]\n: b", "unhashable key"),
        ("/joint_states", "/joint states", "expected a topic such as"),
        ("/commands", "/joint_states", "joints and command must be different topics"),
        (
            "name: one",
            "name: one\nestop: {topic: /commands, type: std_msgs/msg/Bool}",
            "estop and command must be diff",
        ),
        ("name: one", "name: one\nestop: {topic: /stop, type: std_msgs/msg/String}", "estop must be of type std_msgs"),
        ("name: one", "name: one\nsources: {image.a: {topic: /a, type: sensor_msgs/msg/Imu}}", "belongs under cameras"),
        ("name: one", "name: one\ncameras: [{name: a, topic: /a, height: 0, width: 4}]", "at least one pixel"),
        (
            "name: one",
            "name: one\ncameras: [{name: a, topic: /a, height: 4, width: 4, type: std_msgs/msg/Bool}]",
            "Camera 'a': type must be one of",
        ),
        (
            "name: one",
            "name: one\ncameras:" + 2 * "\n- {name: a, topic: /a, height: 4, width: 4}",
            "each camera needs a unique name",
        ),
        (MINIMAL, "- 1", "mine.yaml must be a mapping, found list"),
    ],
)
def test_invalid_descriptions_are_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_robot(written(tmp_path, MINIMAL.replace(old, new)))
    assert "\n" not in str(refusal.value)


def test_an_unknown_robot_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"Unknown robot 'franka_pandas'. Did you mean 'franka_panda'"):
        load_robot("franka_pandas")
    with pytest.raises(UserError, match="Cannot read the robot"):
        load_robot("nowhere.yaml")
