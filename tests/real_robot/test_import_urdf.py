"""Tests of robot descriptions from URDF and MJCF: values are copied exactly, missing values are refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

from robopolicy.resources import folder
from robopolicy_robots.import_urdf import main
from robopolicy_robots.robot import RobotSpec, load_robot

PANDA = folder("sim_assets") / "panda.xml"
URDF = """
<robot name="arm">
  <link name="base"/><link name="l1"/><link name="l2"/><link name="l3"/><link name="l4"/><link name="l5"/>
  <joint name="foot" type="fixed"><parent link="base"/><child link="l1"/></joint>
  <joint name="shoulder" type="revolute"><parent link="base"/><child link="l1"/>
    <limit lower="-2.6179938779914944" upper="1.25" velocity="3.1415" effort="20"/></joint>
  <joint name="elbow" type="revolute"><parent link="l1"/><child link="l2"/>
    <limit lower="0.5" upper="2" velocity="2" effort="0"/></joint>
  <joint name="roll" type="continuous"><parent link="l2"/><child link="l3"/><limit velocity="4" effort="7.5"/></joint>
  <joint name="finger" type="prismatic"><parent link="l3"/><child link="l4"/>
    <limit upper="0.04" velocity="0.2" effort="100"/></joint>
  <joint name="other_finger" type="prismatic"><parent link="l3"/><child link="l5"/><mimic joint="finger"/>
    <limit lower="0" upper="0.04" velocity="0.2" effort="100"/></joint>
</robot>
"""


def describe(folder: Path, text: str, *words: str) -> RobotSpec:
    file, out = folder / "arm.urdf", folder / "arm.yaml"
    file.write_text(text, encoding="utf-8")
    assert main([str(file), "--name", "arm", "--out", str(out), *words]) == 0
    return load_robot(str(out))


def test_limits_of_a_urdf_are_imported_exactly(tmp_path: Path) -> None:
    robot = describe(tmp_path, URDF, "--gripper", "finger")
    assert robot.name == "arm" and robot.names == ("shoulder", "elbow", "roll", "finger")
    limits = robot.limits
    assert limits.position_low.tolist() == [-2.6179938779914944, 0.5, -np.inf, 0.0]
    assert limits.position_high.tolist() == [1.25, 2.0, np.inf, 0.04]
    assert limits.velocity.tolist() == [3.1415, 2.0, 4.0, 0.2] and limits.effort.tolist() == [20, np.inf, 7.5, 100]
    assert np.isinf(limits.acceleration).all() and robot.home.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert [joint.unit for joint in robot.joints] == ["rad", "rad", "rad", "m"]
    assert [joint.gripper for joint in robot.joints] == [False, False, False, True]


def test_joints_can_be_selected_ordered_and_prefixed(tmp_path: Path) -> None:
    words = ("--prefix", "left_", "--joints", "left_elbow", "left_shoulder", "--velocity", "left_elbow=1e-5")
    topics = ("--command", "/go", "--type", "std_msgs/msg/Float64MultiArray", "--rate", "100")
    robot = describe(tmp_path, URDF, *words, *topics, "--range", "left_elbow=1,1.5")
    assert robot.names == ("left_elbow", "left_shoulder") and robot.rate == 100.0
    assert robot.limits.velocity.tolist() == [1e-5, 3.1415] and robot.limits.position_low[0] == 1.0
    assert (robot.command.topic, robot.command.type) == ("/go", "std_msgs/msg/Float64MultiArray")
    assert robot.joints[0].home == 1.0


def test_names_that_yaml_would_parse_as_other_types_stay_strings(tmp_path: Path) -> None:
    robot = describe(tmp_path, URDF.replace('"elbow"', '"1"').replace('"roll"', '"on"'))
    assert robot.names == ("shoulder", "1", "on", "finger")


@pytest.mark.parametrize("name", ["sim_panda", "franka_panda"])
def test_the_model_of_the_panda_gives_the_shipped_description(tmp_path: Path, name: str) -> None:
    """Names, order, ranges, torques, units and gripper agree; MJCF has neither speeds nor a home pose."""
    shipped, out = load_robot(name), tmp_path / "panda.yaml"
    speeds = [f"{joint.name}={joint.velocity}" for joint in shipped.joints]
    assert main([str(PANDA), "--name", "panda", "--prefix", "panda_", "--velocity", *speeds, "--out", str(out)]) == 0
    robot = load_robot(str(out))
    assert robot.names == shipped.names and robot.state == shipped.state
    for found, known in zip(robot.joints, shipped.joints, strict=True):
        assert (found.low, found.high, found.velocity) == (known.low, known.high, known.velocity)
        assert (found.unit, found.gripper) == (known.unit, known.gripper)
    np.testing.assert_array_equal(robot.limits.effort[:7], shipped.limits.effort[:7])


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ('velocity="2"', "", (), "Joint 'elbow' has no velocity limit; set it with --velocity elbow=VALUE."),
        ('velocity="0.2"', 'velocity="0"', (), "Joint 'finger' has no velocity limit"),
        ('velocity="0.2"', "", ("--velocity", "2"), "Joint 'finger' has no velocity limit"),  # 2 is in rad/s
        (
            '<limit lower="0.5" upper="2" velocity="2" effort="0"/>',
            "",
            ("--velocity", "3"),
            "Joint 'elbow' has no range; set it with --range elbow=LOW,HIGH.",
        ),
        ('lower="0.5"', 'lower="half"', (), "The limit 'lower' of joint 'elbow' is not a number: 'half'."),
        ('lower="0.5"', 'lower="3"', (), "Limits of joint 'elbow': 'position_low' must be below"),
        ("", "", ("--joints", "elbo"), "Unknown joint 'elbo'. Did you mean 'elbow'?"),
        ("", "", ("--velocity", "elbow=fast"), "Expected JOINT=NUMBER, got 'fast'."),
        ("", "", ("--range", "elbow=1"), "Expected JOINT=LOW,HIGH, got '1'."),
        (
            "<robot",
            "<robot><xacro:include xmlns:xacro='http://www.ros.org/wiki/xacro'/></robot><!--",
            (),
            "Cannot read",
        ),
        (
            '<robot name="arm">',
            "<robot xmlns:xacro='http://www.ros.org/wiki/xacro'><xacro:include/>",
            (),
            "xacro file; run: xacro arm.urdf",
        ),
        ("robot", "sdf", (), "neither URDF (<robot>) nor MJCF (<mujoco>), found <sdf>"),
        (URDF, "<robot/>", (), "no joints that can be commanded"),
        (URDF, "<mujoco><no/></mujoco>", (), "MuJoCo cannot read arm.urdf"),
        ("", "", ("--type", "std_msgs/msg/Bool"), "command must be one of"),
    ],
)
def test_missing_or_invalid_values_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: tuple[str, ...], message: str
) -> None:
    file, out = tmp_path / "arm.urdf", tmp_path / "arm.yaml"
    file.write_text(URDF.replace(old, new) if old else URDF, encoding="utf-8")
    assert main([str(file), "--name", "arm", "--out", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("import_urdf: error: ") and error.count("\n") == 1 and message in error
    assert not out.exists()


def test_a_model_without_ranges_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "<body><joint name='hinge'/><geom size='0.1'/></body>"
    file = tmp_path / "arm.xml"
    actuator = "<actuator><motor joint='hinge'/></actuator>"
    file.write_text(f"<mujoco><worldbody>{body}</worldbody>{actuator}</mujoco>", encoding="utf-8")
    assert main([str(file), "--name", "arm", "--velocity", "2"]) == 2
    assert "Joint 'hinge' has no range; set it with --range hinge=LOW,HIGH." in capsys.readouterr().err
    assert main([str(file), "--name", "arm", "--velocity", "2", "--range", "hinge=-inf,inf"]) == 0
    assert "low: -.inf, high: .inf, velocity: 2}" in capsys.readouterr().out


def test_a_urdf_needs_no_mujoco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    assert describe(tmp_path, URDF).names[0] == "shoulder"
