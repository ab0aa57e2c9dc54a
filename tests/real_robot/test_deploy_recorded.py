"""Tests of `robopolicy deploy --task none`: a policy of recorded data or a leader arm moves a robot of a YAML file."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import arm_of_lerobot
import numpy as np
import pytest
import yaml
from own_arm import GOAL, JOINTS, record
from scripted_device import ScriptedTeleop

from robopolicy.cli import main as cli
from robopolicy.cli.commands import COMMANDS
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec, TaskMetadata
from robopolicy.teleop.contract import STOP, TeleopCommand
from robopolicy.teleop.devices import DEVICES
from robopolicy_robots import cli as deploy_cli
from robopolicy_robots.robot import SHIPPED, load_robot
from robopolicy_robots.setup import joint_setup, robot_setup
from robopolicy_robots.transports.lerobot import JointUnits


class Leader(ScriptedTeleop):
    """A leader arm that turns one joint by 0.3 rad and opens the gripper halfway; `done` ends the session."""

    done: ClassVar[Callable[[], bool]]

    @classmethod
    def open(cls, argument: str = "") -> "Leader":
        return cls(lambda call: replace(cls.command(call), events=(STOP,) if cls.done() else ()))

    @staticmethod
    def command(call: int) -> TeleopCommand:
        joints = dict.fromkeys(JOINTS, 1.0) | {"shoulder_pan": 1.0 + min(max(call - 15, 0), 20) * 0.015, "gripper": 0.5}
        return TeleopCommand(call > 10, joints=joints)


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of an arm with LeRobot's interface; its `made` holds the created instances."""
    monkeypatch.setitem(COMMANDS._rows, "deploy", deploy_cli.COMMAND)
    for name, module in arm_of_lerobot.stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    robots, cameras = (importlib.import_module(f"lerobot.{name}") for name in ("robots", "cameras"))
    found = arm_of_lerobot.define(robots, cameras)
    monkeypatch.setattr(arm_of_lerobot, "arm_class", found, raising=False)
    return found


def test_a_clone_of_recorded_demonstrations_moves_an_arm_to_their_pose(arm: Any, tmp_path: Path) -> None:
    """From a dataset to a moving arm, with no task and no simulator."""
    data = record(tmp_path / "data", episodes=30)
    settings = ["task=none", "policy=gaussian", "policy.hidden=[64]", "algorithm=bc", "algorithm.lr=3e-3"]
    settings += [f"dataset={data}", "budget.updates=600", f"out={tmp_path}", "name=run"]
    assert cli.main(["train", *settings]) == 0
    robot = yaml.safe_load((SHIPPED / "so101.yaml").read_text())
    robot["transport_options"] = {"lerobot": {"type": "still_arm", "port": "/dev/null"}}
    (tmp_path / "my_arm.yaml").write_text(yaml.safe_dump(robot))
    words = ["--robot", str(tmp_path / "my_arm.yaml"), "--policy", str(tmp_path / "run/checkpoints/best")]
    words += ["--task", "none", "--transport", "lerobot", "--seconds", "3", "--no-tui"]
    assert cli.main(["deploy", *words, "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["task"] == "none" and report["episodes"][0]["state"] != "estop"
    sent = np.array([[action[f"{joint}.pos"] for joint in JOINTS] for action in arm.made[-1].actions])
    found = load_robot(str(tmp_path / "my_arm.yaml"))
    reached = JointUnits.of(found, "degrees").si(sent)
    assert np.abs(reached[-1] - GOAL).max() < np.abs(reached[0] - GOAL).max()


def my_arm(tmp_path: Path, **changes: Any) -> str:
    """Write the description of an arm with one camera and return its path."""
    robot = yaml.safe_load((SHIPPED / "so101.yaml").read_text()) | {"rate": 10}
    settings: dict[str, Any] = {"type": "still_arm", "port": "/dev/null"}
    settings["cameras"] = {"front": {"type": "grey", "width": 8, "height": 6, "shade": 9}}
    robot["transport_options"] = {"lerobot": settings}
    robot["safety"] = {"max_age": 2.0, "max_camera_age": 2.0, "estop_after": 20.0, "max_tracking_error": 2.0}
    robot["safety"] |= {"max_overruns": 100}  # for a busy machine
    (tmp_path / "my_arm.yaml").write_text(yaml.safe_dump(robot | changes))
    return str(tmp_path / "my_arm.yaml")


def test_a_leader_arm_moves_a_robot_without_a_task_and_is_recorded_with_its_cameras(
    arm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES._rows, "leader", Leader)
    observe = arm.get_observation
    fresh = lambda self: {key: np.copy(value) for key, value in observe(self).items()}  # noqa: E731
    monkeypatch.setattr(arm, "get_observation", fresh)  # every image is new

    def reached() -> bool:
        at = arm.made[-1].at if arm.made else {"shoulder_pan": 0.0, "gripper": 0.0}  # [deg, %]
        return abs(at["shoulder_pan"] - np.degrees(0.3)) < 0.5 and abs(at["gripper"] - 50.0) < 1.0

    monkeypatch.setattr(Leader, "done", staticmethod(reached), raising=False)
    file = my_arm(tmp_path, cameras=[{"name": "front", "topic": "/front", "height": 4, "width": 6}])
    words = ["--robot", file, "--task", "none", "--transport", "lerobot", "--teleop", "leader", "--no-tui"]
    words += ["--seconds", "40", "--out", str(tmp_path / "report.json"), "--overwrite"]
    for attempt in range(3):  # on a busy machine a late command holds the robot, and the leader is then too far away
        out = tmp_path / f"data{attempt}"
        assert cli.main(["deploy", *words, "--demonstrations", str(out)]) == 0
        if reached():
            break
    sent = np.array([[action[f"{joint}.pos"] for joint in JOINTS] for action in arm.made[-1].actions])
    path = JointUnits.of(load_robot(file), "degrees").si(sent)
    assert path[0] == pytest.approx([*[0.0] * 5, -0.1745], abs=0.01), "it starts where it is"
    assert path[-1] == pytest.approx([0.3, 0, 0, 0, 0, 0.785], abs=0.02)
    data = read_lerobot(out)
    assert np.abs(np.diff(data.arrays["action"], axis=0)).max() <= 4.4 / 10 + 1e-6
    assert data.num_episodes == 1 and data.control_dt == pytest.approx(1 / 10)
    assert tuple(data.names["state"]) == tuple(data.names["action"]) == tuple(f"{joint} [rad]" for joint in JOINTS)
    images = data.arrays["image.front"]
    assert images.shape[1:] == (3, 4, 6) and abs(int(images[0, 0, 0, 0]) - 9) <= 1
    assert not data.arrays["intervention"][0] and data.arrays["intervention"][-1]


@pytest.mark.parametrize(("rate", "dt"), [(50.0, 0.04), (30.0, 1 / 30), (20.0, 0.05), (500.0, 0.034)])
def test_actions_of_a_leader_arm_last_whole_periods_and_at_least_a_30th_of_a_second(rate: float, dt: float) -> None:
    requirements = robot_setup(replace(load_robot("so101"), rate=rate)).requirements
    assert requirements.control_dt == pytest.approx(dt) and requirements.observation == {"state": (6,)}


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        (TeleopCommand(), {}, "Without a task, --teleop needs a leader arm"),
        (TeleopCommand(joints={"elbow": 1.0}), {}, "has the joints elbow, and lacks shoulder_pan"),
        (
            Leader.command(0),
            {"joints": [{"name": "shoulder_pan", "velocity": 1, "unit": "m"}]},
            "'shoulder_pan' of so101 is in m",
        ),
        (Leader.command(0), {"joints": [{"name": "gripper", "velocity": 1}]}, "needs a range"),
    ],
)
def test_a_device_that_does_not_fit_the_robot_is_refused(
    command: TeleopCommand,
    changes: Any,
    message: str,
    arm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Device(ScriptedTeleop):
        @classmethod
        def open(cls, argument: str = "") -> "Device":
            return cls(lambda _: command)

    monkeypatch.setitem(DEVICES._rows, "device", Device)
    words = ["--robot", my_arm(tmp_path, **changes), "--task", "none", "--transport", "lerobot", "--teleop", "device"]
    assert cli.main(["deploy", *words, "--out", str(tmp_path / "report.json")]) == 2
    assert message in capsys.readouterr().err and not arm.made


def source(names: tuple[str, ...], state: tuple[int, ...] = (6,), dt: float | None = 0.05) -> Any:
    metadata = TaskMetadata("none", dt, action_names=names)
    return SimpleNamespace(spec=PolicySpec({"state": state}, action_dim=6), task_metadata=metadata)


def test_the_state_holds_positions_or_positions_and_velocities() -> None:
    robot = load_robot("so101")
    for size in (6, 12):
        setup = joint_setup(source(JOINTS, (size,)), robot)
        assert setup.requirements.observation == {"state": (size,)} and setup.requirements.control_dt == 0.05
        assert setup.make({}).joints == JOINTS


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (source(JOINTS[::-1]), "list the joints in that order"),
        (source(tuple(f"{joint} [deg]" for joint in JOINTS)), "'shoulder_pan' of the policy is in deg"),
        (source(JOINTS, dt=None), "needs the rate of the actions"),
        (SimpleNamespace(spec=PolicySpec({"state": (6,)}, action_dim=6)), "needs the rate of the actions"),
    ],
)
def test_a_policy_of_other_joints_or_units_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        joint_setup(policy, load_robot("so101"))


def test_a_simulated_robot_needs_a_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(COMMANDS._rows, "deploy", deploy_cli.COMMAND)
    assert cli.main(["deploy", "--robot", "sim_panda", "--policy", "x", "--task", "none"]) == 2
    assert "needs a task" in capsys.readouterr().err
