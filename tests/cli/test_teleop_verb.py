"""Tests of `robopolicy teleop` and `collect --takeover` with a scripted device."""

import json
import os
import signal
from contextlib import closing

import numpy as np
import pytest
from scripted_device import ScriptedTeleop

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.teleop.contract import SUCCESS, TeleopCommand
from robopolicy.teleop.devices import DEVICES
from robopolicy.training.checkpoint import save_checkpoint

RIGHT = np.array([1.0, 0, 0, 0, 0, 0])


class Steady(ScriptedTeleop):
    """Take over from the third call on, and end every episode after ten calls."""

    @classmethod
    def open(cls, argument: str = "") -> "Steady":
        if argument == "interrupt":
            return cls(lambda k: TeleopCommand(True, events=(SUCCESS,) * (k == 2)) if k < 4 else interrupt())
        return cls(lambda k: TeleopCommand(k % 10 > 1, RIGHT * (k % 10 > 2), events=(SUCCESS,) * (k % 10 == 9)))


def interrupt() -> TeleopCommand:
    os.kill(os.getpid(), signal.SIGINT)
    return TeleopCommand()


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    monkeypatch.setitem(DEVICES._rows, "steady", Steady)


def test_demonstrations_are_recorded_as_a_dataset(tmp_path, capsys):
    out = tmp_path / "data"
    options = ["--device", "steady", "--speed", "100", "--episodes", "2", "--seed", "5", "--out", str(out), "--json"]
    assert main(["teleop", "push", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kept"] == 2 and report["frames"] == 14
    data = read_lerobot(out)
    assert data.seeds.tolist() == [5, 6] and data.lengths.tolist() == [7, 7] and data.success.all()
    assert data.arrays["intervention"].all() and data.arrays["action"][:, 0].max() > 0
    assert data.names["action"] == ("gripper_vx [m/s]", "gripper_vy [m/s]")


def test_episodes_are_kept_after_an_interruption(tmp_path):
    out = tmp_path / "data"
    options = ["--device", "steady:interrupt", "--speed", "100", "--episodes", "9", "--out", str(out)]
    assert main(["teleop", "push", *options]) == 0
    assert read_lerobot(out).num_episodes == 1


def test_a_session_without_output_records_nothing(capsys):
    assert main(["teleop", "push", "--device", "steady", "--speed", "100", "--episodes", "1"]) == 0
    assert "toy/push: kept 1 episode (7 frames)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["teleop", "push", "--device", "joystick"], "Unknown device 'joystick'"),
        (["teleop", "push", "--device", "steady", "--map", "x"], "--map needs one input per dimension"),
        (["teleop", "push", "--device", "steady", "--scale", "2"], "--scale must be positive and at most 1"),
        (["teleop", "push", "--speed", "nan"], "--speed must be positive"),
        (["teleop", "push", "--keep-failures"], "--keep-failures has no effect without --out"),
        (["teleop", "push", "--out", "x", "--image-size", "9"], "--image-size has no effect without --cameras"),
        (["teleop", "push", "--device", "browser:nowhere"], "needs an address"),
        (["collect", "push", "--out", "x", "--speed", "2"], "--speed has no effect without --takeover"),
        (["collect", "push", "--out", "x", "--takeover"], "--takeover needs the policy"),
        (["collect", "push", "--out", "x", "--takeover", "--policy", "random"], "--takeover needs the policy"),
        (
            ["collect", "push", "--out", "x", "--takeover", "--policy", "c", "--noise", "1"],
            "--noise has no effect with",
        ),
    ],
)
def test_wrong_options_are_reported_in_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_person_takes_over_from_a_checkpoint(tmp_path):
    spec = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=4)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), normalization="identity"), spec)
    with closing(make_sim("point_mass", SimOptions(num_envs=1))) as sim:
        obs = {"state": sim.reset(0)["state"][:, None]}
    save_checkpoint(tmp_path / "ckpt", policy, task="toy/point_mass", obs_sample=obs)
    options = ["--takeover", "steady", "--speed", "100", "--episodes", "1", "--out", str(tmp_path / "data")]
    assert main(["collect", "point_mass", "--policy", str(tmp_path / "ckpt"), *options]) == 0
    data = read_lerobot(tmp_path / "data")
    assert data.arrays["intervention"].tolist() == [False] * 2 + [True] * 7
    same = (data.arrays["action"] == data.arrays["policy_action"]).all(1)
    assert same[:2].all() and not same[4:].any()
