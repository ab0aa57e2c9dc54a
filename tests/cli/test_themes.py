"""Tests of contrib themes: commands, tasks and presets are found by name and listed without imports."""

import json
import sys
from types import ModuleType

import pytest

from robopolicy import plugins
from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.resources import preset_files
from robopolicy.sim.registry import SimOptions, get_task, make_sim, task_names
from robopolicy.training.compose import compose_config
from robopolicy_tasks.toy.point_mass import PointMassExpert, PointMassSim

THEME = """
[commands]
shout = {module = "demo_theme", help = "say it loudly", needs_mujoco = false}

[tasks."demo/glide"]
make = "demo_theme:make"
expert = "demo_theme:expert"
description = "Glide to a goal."
backends = ["torch"]
"""


@pytest.fixture
def theme(tmp_path, monkeypatch):
    """Folder of the only theme; its module cannot be imported."""
    folder = tmp_path / "contrib" / "demo"
    (folder / "configs" / "experiment").mkdir(parents=True)
    (folder / "configs" / "task").mkdir()
    (folder / "theme.toml").write_text(THEME)
    (folder / "configs" / "task" / "gliding.yaml").write_text("# @package _global_\ntask:\n  name: demo/glide\n")
    preset = "# @package _global_\n# Glide by PPO. More.\ndefaults:\n  - override /task: gliding\nseed: 7\n"
    (folder / "configs" / "experiment" / "glide_bc.yaml").write_text(preset)
    monkeypatch.setattr(plugins, "CONTRIB", tmp_path / "contrib")
    plugins.themes.cache_clear()
    yield folder
    plugins.themes.cache_clear()


@pytest.fixture
def module(theme, monkeypatch):
    """The module of the theme."""
    made = ModuleType("demo_theme")
    made.add_parser = lambda subparsers: subparsers.add_parser("shout", description="Shouts.")
    made.run = lambda args: 7
    made.make, made.expert = PointMassSim, PointMassExpert
    monkeypatch.setitem(sys.modules, "demo_theme", made)
    return made


def test_a_theme_is_listed_without_being_imported(theme, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\n    shout       say it loudly\n" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in (*listed["tasks"], *listed["experiments"])}
    assert rows["demo/glide"] == {
        "name": "demo/glide",
        "description": "Glide to a goal.",
        "missing": "",
        "expert": True,
        "backends": ["torch"],
        "success": "any",
        "ring": "demo",
    }
    assert rows["toy/point_mass"]["ring"] == "product"
    assert rows["glide_bc"]["description"] == "Glide by PPO."
    assert "demo_theme" not in sys.modules
    assert main(["shot"]) == 2 and "Did you mean 'shout'?" in capsys.readouterr().err


def test_a_theme_command_runs(module, capsys):
    assert main(["shout"]) == 7
    with pytest.raises(SystemExit):
        main(["shout", "--help"])
    assert "Shouts." in capsys.readouterr().out


def test_a_theme_task_is_found_by_its_full_or_last_name(module):
    assert "demo/glide" in task_names() and get_task("glide").name == "demo/glide"
    assert isinstance(make_sim("glide", SimOptions(num_envs=3)), PointMassSim)
    assert isinstance(get_task("demo/glide").require_expert()(), PointMassExpert)
    with pytest.raises(UserError, match="Did you mean 'demo/glide'"):
        get_task("demo/glid")


def test_theme_presets_are_selected_like_product_presets(theme):
    assert compose_config(["task=gliding"]).task.name == "demo/glide"
    config = compose_config(["experiment=glide_bc", "algorithm=ppo", "policy=gaussian"])
    assert (config.task.name, config.seed) == ("demo/glide", 7)
    with pytest.raises(UserError, match="Did you mean 'glide_bc'"):
        compose_config(["experiment=glide_b"])


def test_duplicate_presets_are_refused(theme):
    (theme / "configs" / "experiment" / "fine_tune.yaml").write_text("")
    with pytest.raises(ValueError, match=r"experiment=fine_tune is defined by .*demo"):
        preset_files("experiment")
