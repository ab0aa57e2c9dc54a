"""Tests of `robopolicy deploy --check`: every check runs, failures are named, and the exit code reports them."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from scripted import NAMES, ScriptedLift

from robopolicy.cli import main as cli
from robopolicy.cli.commands import COMMANDS
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy_robots import check as checks
from robopolicy_robots import cli as deploy_cli
from robopolicy_robots.policy_source import PolicyRequirements
from robopolicy_robots.robot import SHIPPED

DOMAIN = 100 + os.getpid() % 100
WORDS = ["deploy", "--task", "lift", "--policy", "scripted", "--transport", "loopback", "--check"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(COMMANDS._rows, "deploy", deploy_cli.COMMAND)
    monkeypatch.setattr(checks, "DISCOVERY_TIMEOUT", 1.0)
    monkeypatch.setattr(checks, "MEASURE_TIME", 0.3)
    monkeypatch.setattr(checks, "SLACK", 0.5)  # for a busy machine
    monkeypatch.setenv("COLUMNS", "200")


def run(monkeypatch, capsys, robot: str = "sim_panda", source: Any = None) -> tuple[int, dict[str, str]]:
    """Return the exit code and the line of every check by name."""
    source = source or CheckpointChunkPolicy(ScriptedLift())
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    code = cli.main([*WORDS, "--robot", robot, "--domain", str(DOMAIN)])
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return code, {f"{row[1].strip()} {row[2].strip()}": row[3].strip() for row in rows}


def other(tmp_path: Path, **changes: Any) -> str:
    """Write the sim_panda description with `changes` and return its path."""
    robot = yaml.safe_load((SHIPPED / "sim_panda.yaml").read_text())
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(robot | changes))
    return str(path)


def test_a_working_robot_passes(monkeypatch, capsys):
    code, rows = run(monkeypatch, capsys)
    assert code == 0 and all(name.endswith("pass") for name in rows), rows
    assert "1 publisher of /joint_states" in rows["source joints pass"]
    assert (
        "pressed received after" in rows["emergency stop pass"] and "released received" in rows["emergency stop pass"]
    )
    assert rows["command time-out pass"].startswith("holds ") and rows["command time-out pass"].endswith(
        "declared 250 ms"
    )
    assert "ticks per action" in rows["rate pass"] and "of a chunk's 8 actions of 50 ms" in rows["inference pass"]


def test_an_undeclared_or_exceeded_time_out_fails(monkeypatch, capsys, tmp_path):
    code, rows = run(monkeypatch, capsys, other(tmp_path, command_timeout=None))
    assert code == 2 and "not declared" in rows["command time-out FAIL"]
    monkeypatch.setattr(checks, "SLACK", -1.0)
    code, rows = run(monkeypatch, capsys)
    assert code == 2 and "declared 250 ms" in rows["command time-out FAIL"]


def test_missing_messages_are_reported(monkeypatch, capsys, tmp_path):
    topic = {"topic": "/nowhere", "type": "geometry_msgs/msg/PoseStamped", "qos": "sensor"}
    monkeypatch.setattr("robopolicy_robots.simulated.node.SimNode._publish", lambda self: None)
    monkeypatch.setattr("robopolicy_robots.simulated.client.Simulation.reset", lambda self, seed: None)
    code, rows = run(monkeypatch, capsys, other(tmp_path, sources={"object.cube": topic}))
    assert code == 2 and rows["source object.cube FAIL"] == "1 publisher of /nowhere, 0 Hz"
    assert "no joint state yet" in rows["joints FAIL"]


@pytest.mark.parametrize(
    "changes, name, found",
    [
        ({"observation": {"state": (7,)}}, "task", "expects 'state' of shape (7,), the task provides"),
        ({"action_dim": 7}, "task", "7 actions and the task 5"),
    ],
)  # fmt: skip
def test_a_policy_for_another_task_fails(changes, name, found, monkeypatch, capsys):
    source = CheckpointChunkPolicy(ScriptedLift())
    source.policy.spec = replace(source.policy.spec, **changes)
    code, rows = run(monkeypatch, capsys, source=source)
    assert code == 2 and found in rows[f"{name} FAIL"]


def test_a_missing_camera_is_reported_in_one_line(monkeypatch, capsys):
    source = CheckpointChunkPolicy(ScriptedLift())
    source.policy.spec = replace(source.policy.spec, observation={"image.top": (3, 8, 8)})
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    assert cli.main([*WORDS, "--robot", "sim_panda", "--domain", str(DOMAIN)]) == 2
    assert "Unknown source 'image.top' of robot sim_panda" in capsys.readouterr().err


def test_a_slow_policy_with_a_distant_first_target_fails(monkeypatch, capsys):
    clock = iter(np.arange(1e6) * 0.3)
    source = CheckpointChunkPolicy(ScriptedLift(4, 4))
    patched = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None)
    subject: Any = SimpleNamespace(
        source=source,
        robot=SimpleNamespace(
            dt=0.02, rate=10.0, mode="absolute", names=("a",), safety=SimpleNamespace(max_initial_error=0.5)
        ),
        embodiment=SimpleNamespace(
            control_dt=0.05,
            joints=("a",),
            start=lambda state: None,
            observe=lambda state: {"state": np.zeros(len(NAMES), np.float32)},
            command=lambda action, state: np.array([3.0]),
        ),
        requirements=PolicyRequirements("lift", {"state": (len(NAMES),)}, np.zeros(5), np.ones(5), 0.05),
    )
    inputs: Any = SimpleNamespace(state={}, measured=lambda now: SimpleNamespace(position=np.zeros(1)))
    monkeypatch.setattr(checks, "time", patched)
    found = {each.name: each for each in checks._policy(subject, inputs)}
    assert found.pop("task").ok and not any(each.ok for each in found.values())
    assert "3.000 rad or m" in found["first target"].found and "0 of a chunk's 4" in found["inference"].found
    assert "0.5 ticks" in found["rate"].found
