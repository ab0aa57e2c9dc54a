"""Tests of `robopolicy play`, which writes videos, and `robopolicy list`, which shows available names."""

import json
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from robopolicy.cli import list as list_verb
from robopolicy.cli.main import main
from robopolicy.sim.registry import get_task
from robopolicy_tasks.toy.point_mass import PointMassSim

TASK = "toy/point_mass"
PYPROJECT = Path(list_verb.__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def rendering(monkeypatch):
    """Makes the point mass render without GL."""

    def render(self, camera=None, *, width=320, height=240, envs=1):
        return torch.full((envs, 3, height, width), 90, dtype=torch.uint8)

    monkeypatch.setattr(PointMassSim, "render", render)


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_play_records_a_video_of_the_expert(rendering, tmp_path, capsys, suffix):
    out = tmp_path / "new" / f"expert{suffix}"
    argv = ["play", "expert", "--task", TASK, "--episodes", "2", "--seed", "5", "--width", "64", "--height", "48"]
    assert main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "seed 5: success" in printed and f"video: {out}" in printed
    assert [file.name for file in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["random", "--task", TASK], "No video: Task toy/point_mass cannot render images."),
        (["random", "--task", TASK, "--out", "x.avi"], "--out must end in .mp4 or .gif, got x.avi"),
        (["random", "--task", TASK, "--width", "0"], "--width must be at least 1, got 0"),
        (["random", "--task", TASK, "--viewer"], "--viewer requires a display"),
    ],
)
def test_play_refuses_in_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["play", *argv]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_play_reports_tasks_without_rendering(monkeypatch, tmp_path, refused):
    monkeypatch.setattr(PointMassSim, "render", Mock(side_effect=NotImplementedError))
    line = refused("play", "random", "--task", TASK, "--out", tmp_path / "x.mp4")
    assert f"No video: task {TASK} does not support rendering." in line


def test_list_shows_every_kind(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if not line.startswith(" ")] == list(list_verb.kinds())
    for name in (TASK, "manipulation/lift", "gymnasium/<id>", "flow", "reinflow", "fine_tune", "mujoco-exact"):
        assert f"  {name} " in printed
    assert "  zenoh " in printed  # a transport of `deploy`


def test_list_contains_every_backend_of_a_task(capsys):
    assert main(["list", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    named = {backend for task in sections["tasks"] for backend in task.get("backends", [])}
    assert named <= {row["name"] for row in sections["backends"]}


def test_list_names_the_missing_extra(capsys, monkeypatch):
    monkeypatch.setattr(list_verb, "_lacks", lambda module: module == "envpool")
    assert main(["list", "backends"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("[missing: pip install 'robopolicy[envpool]']") == 1 and "flow" not in printed


def test_every_extra_that_is_named_exists(capsys, monkeypatch):
    monkeypatch.setattr(list_verb, "_lacks", bool)
    assert main(["list", "--json"]) == 0
    rows = [row for kind in json.loads(capsys.readouterr().out).values() for row in kind]
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert {row["missing"] for row in rows} - {""} <= extras.keys()
    missing = {row["name"]: row["missing"] for row in rows}
    assert missing["prompts/<id>"] == "" and missing["reasoning_gym/<id>"] == "text"


def test_list_contains_text_policies_and_algorithms(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in ("text", "text_recipe", "text_sft"):
        assert f"\n  {name} " in printed


def test_list_names_the_tasks_on_which_a_kind_of_experiment_was_tried(capsys):
    assert main(["list", "experiments", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["experiments"]}
    for kind in ("few_demonstrations", "fine_tune", "offline_to_online", "from_scratch"):
        for task in rows[kind]["tried_on"]:
            get_task(task)
    assert "dppo" in rows["fine_tune"]["algorithms"] and "expo" in rows["offline_to_online"]["algorithms"]
    assert main(["list", "experiments"]) == 0
    assert "tried on lift, pick_place, drawer" in capsys.readouterr().out


def test_list_as_json(capsys):
    assert main(["list", "tasks", "--json"]) == 0
    (tasks,) = json.loads(capsys.readouterr().out).values()
    lift = next(task for task in tasks if task["name"] == "manipulation/lift")
    assert lift["expert"] and "mujoco" in lift["backends"] and lift["missing"] == ""
    assert lift["success"] == "end"


def test_list_says_when_a_task_reports_success(capsys):
    assert main(["list", "tasks"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "success ends the episode" in lines["manipulation/lift"]
    assert "no success, only returns" in lines["locomotion/hopper"]
    assert "at their last step" in lines["velocity/go1"]


def test_list_of_an_unknown_kind_suggests_the_nearest(capsys):
    assert main(["list", "taks"]) == 2
    assert "Did you mean 'tasks'?" in capsys.readouterr().err


def test_missing_packages_are_found_without_importing_them():
    assert list_verb._lacks("no_such_package") and not list_verb._lacks("torch") and not list_verb._lacks("")
