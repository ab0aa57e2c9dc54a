"""Test of `deploy --teleop`: a person moves a simulated robot through the control loop, and the episode is recorded."""

import numpy as np
import pytest
from scripted_device import ScriptedTeleop

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.teleop.contract import TeleopCommand
from robopolicy.teleop.devices import DEVICES


class Upward(ScriptedTeleop):
    """Move up after neutral axes, and let go in the end."""

    @classmethod
    def open(cls, argument: str = "") -> "Upward":
        return cls(lambda k: TeleopCommand(k < 30, np.array([0, 0, float(k > 5), 0, 0, 0])))


def test_a_person_moves_a_robot_and_the_episode_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setitem(DEVICES._rows, "upward", Upward)
    out = tmp_path / "data"
    words = [
        "--robot",
        "sim_panda",
        "--task",
        "lift",
        "--transport",
        "loopback",
        "--lockstep",
        "--rate",
        "20",
        "--no-tui",
    ]
    files = ["--demonstrations", str(out), "--out", str(tmp_path / "report.json")]
    assert main(["deploy", *words, "--teleop", "upward", *files]) == 0
    data = read_lerobot(out)
    assert data.num_episodes == 1 and 50 <= len(data) <= 61 and not data.success.any()
    assert {data.arrays[f"image.{camera}"].shape[1:] for camera in ("front", "wrist")} == {(3, 64, 64)}
    acted, height = data.arrays["intervention"], data.arrays["state"][:, 16]
    assert acted[0] and not acted[-1] and data.arrays["action"][:, 2].max() == pytest.approx(1.0)
    assert height[-1] > height[0] + 0.05 and np.abs(np.diff(height[-5:])).max() < 1e-3, "it rises, then holds"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Pass a policy with --policy, a person's device with --teleop, or both"),
        (["--policy", "x", "--demonstrations", "y"], "--demonstrations has no effect without --teleop"),
        (["--teleop", "nothing"], "Unknown device 'nothing'"),
    ],
)
def test_wrong_options_are_reported(words, message, capsys, tmp_path):
    report = ["--out", str(tmp_path / "report.json")]
    assert main(["deploy", "--robot", "sim_panda", "--task", "lift", *words, *report]) == 2
    assert message in capsys.readouterr().err
