"""Tests of the fine-tuning benchmark: a complete cell on a tiny task, and the table computed from cells."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.finetune import cell as cell_module
from benchmarks.finetune.cell import judge, run_cell
from benchmarks.finetune.methods import FLOW, METHODS, Method, notes, standard
from benchmarks.finetune.table import figures, rows
from benchmarks.finetune.tasks import BenchTask
from robopolicy.resources import folder

POINT_MASS = BenchTask(
    "point_mass", "toy/point_mass", 4, 600, 4, cloning_updates=5, steps_per_update=32, num_envs=8, rollout=16
)


def test_every_method_has_settings_in_its_preset():
    for method in METHODS.values():
        kind, algorithm = (choice.partition("=")[2] for choice in method.preset)
        assert (folder("configs") / "settings" / kind / f"{algorithm}.yaml").is_file(), method.name


def test_variants_run_only_on_lift_by_default():
    assert standard("lift") == list(METHODS)
    variants = {name for name, method in METHODS.items() if method.variant}
    assert set(METHODS) - set(standard("push")) == variants
    assert set(METHODS) - set(standard("hopper")) == variants | {"dqc"} and "`dqc` has no row on hopper" in notes()[0]


@pytest.fixture
def small_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cell_module, "WORK", tmp_path)
    monkeypatch.setattr(cell_module, "EPISODES", 4)
    return tmp_path


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            Method("dsrl_na", "dsrl_na", FLOW, settings=("replay.learning_starts=100",)), marks=pytest.mark.slow
        ),
        pytest.param(Method("flow_grpo", "flow_grpo", FLOW), marks=pytest.mark.slow),
        Method("reinflow", "reinflow", FLOW),
        Method("rlpd", "rlpd", None, True, settings=("policy=squashed_gaussian", "replay.learning_starts=100")),
    ],
    ids=lambda method: method.name,
)
def test_a_cell_runs_from_demonstrations_to_evaluation(small_work: Path, method: Method):
    cell = run_cell(method, POINT_MASS, 0)
    assert (cell["base"] is None) == (method.base is None)
    assert cell["finetuned"]["n"] == 4
    assert 0 < cell["env_steps"] <= 1200
    assert 0 <= cell["seconds_updating"] <= cell["seconds"] > 0
    checkpoints = small_work / "runs" / f"{method.name}-point_mass-0/checkpoints"
    assert judge(checkpoints / "best", POINT_MASS.task) == cell["finetuned"]
    assert judge(checkpoints / "last", POINT_MASS.task) == cell["last"]


@pytest.mark.slow
def test_the_same_policy_is_evaluated_once(small_work: Path, monkeypatch: pytest.MonkeyPatch):
    method = Method("reinflow", "reinflow", FLOW)
    run_cell(method, POINT_MASS, 0)
    base = small_work / "base" / "flow-point_mass-0" / "checkpoints" / "last"
    copied = small_work / "copied"
    shutil.copytree(base, copied)
    known = judge(base, POINT_MASS.task)
    monkeypatch.setattr(cell_module, "evaluate", lambda *_, **__: pytest.fail("played again"))
    assert judge(copied, POINT_MASS.task) == known
    with pytest.raises(pytest.fail.Exception, match="played again"):
        judge(copied, "toy/push")


def cell(seed: int, before: float, after: float, crossing: float | None) -> dict[str, Any]:
    """A cell of 100 episodes on each side."""
    return {
        "task": "lift",
        "method": "reinflow",
        "seed": seed,
        "base": {"success": before, "n": 100},
        "finetuned": {"success": after, "n": 100, "network_calls_per_action": 1.0},
        "last": {"success": before, "n": 100, "network_calls_per_action": 1.0},
        "env_steps": 1000,
        "steps_to_goal": crossing,
        "seconds": 10.0 * seed,
        "seconds_updating": 5.0,
        "restored": 0,
    }


def test_episodes_of_all_seeds_are_pooled():
    cells = [cell(1, 0.5, 0.9, 400.0), cell(2, 0.6, 0.94, None), cell(3, 0.7, 0.98, 600.0)]
    (row,) = rows(cells)
    assert str(row["before"]).startswith("60.0%") and str(row["after"]).startswith("94.0%")
    assert row["last"] == "60.0%"
    assert (row["seeds"], row["steps to 90 %"], row["seconds"]) == (3, "600 (2 of 3)", 20)
    found = figures(cells)["lift"]["reinflow"]
    assert found["finetuned"]["low"] < 0.94 < found["finetuned"]["high"]
    assert found["steps_to_goal"] == [400.0, None, 600.0]
    (never,) = rows([cell(seed, 0.5, 0.6, None) for seed in (1, 2)])
    assert never["steps to 90 %"] == "> 1,000 (0 of 2)"
