"""Tests of point clouds in the command line: collection, training and evaluation."""

import json
from pathlib import Path

import pytest

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import UserError
from robopolicy.sim import gl
from robopolicy.sim.registry import observation_options


def test_observation_options_cover_all_policies():
    clouds, images = {"point_cloud.wrist": (64, 3), "state": (3,)}, {"image.front": (3, 32, 32)}
    assert observation_options([clouds, images, {"point_cloud.front": (64, 3)}]) == {
        "cameras": ("front",),
        "image_size": 32,
        "point_clouds": ("front", "wrist"),
        "points": 64,
    }
    assert observation_options([{"state": (3,)}]) == {}
    with pytest.raises(UserError, match=r"'point_cloud\.\*' of different sizes \[32, 64\]"):
        observation_options([clouds, {"point_cloud.front": (32, 3)}])


def test_a_policy_is_trained_and_evaluated_on_the_same_point_clouds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    try:
        gl.gl_backend()
    except UserError as error:
        pytest.skip(str(error))
    data = tmp_path / "data"
    clouds = ["--point-clouds", "front", "--points", "8"]
    assert main(["collect", "lift", "--episodes", "1", *clouds, "--out", str(data)]) == 0
    cloud = read_lerobot(data).arrays["point_cloud.front"]
    assert cloud.shape[1:] == (8, 3) and abs(cloud).max() < 1.0
    settings = ["task.point_clouds=[front]", "task.points=8", f"dataset={data}", f"out={tmp_path}", "name=run"]
    cheap = ["policy.point_cloud.widths=[8]", "policy.steps=1", "budget.updates=1", "evaluation.episodes=0"]
    assert main(["train", "task=lift", "algorithm=bc", "policy=flow", "chunk.horizon=8", *settings, *cheap]) == 0
    capsys.readouterr()
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last")
    assert main(["eval", checkpoint, "--episodes", "1", "--json", "--out", str(tmp_path / "judged")]) == 0
    assert json.loads(capsys.readouterr().out)["results"]
    wrong = ["task=lift", "algorithm=bc", "policy=flow", *settings, *cheap, "task.points=9", "evaluation.episodes=1"]
    wrong += ["name=wrong"]
    assert main(["train", *wrong]) == 2
    assert "set task.points=8" in capsys.readouterr().err
