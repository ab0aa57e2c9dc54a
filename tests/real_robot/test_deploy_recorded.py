"""Tests of `robopolicy deploy --task none`: a policy of recorded data drives a robot described in YAML."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arm_of_lerobot
import numpy as np
import pytest
import yaml
from own_arm import GOAL, JOINTS, record

from robopolicy.cli import main as cli
from robopolicy.cli.commands import COMMANDS
from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec, TaskMetadata
from robopolicy_robots import cli as deploy_cli
from robopolicy_robots.robot import SHIPPED, load_robot
from robopolicy_robots.setup import joint_setup
from robopolicy_robots.transports.lerobot import JointUnits


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
