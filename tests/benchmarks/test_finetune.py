"""Tests of the fine-tuning benchmark: a complete cell on a tiny task, and the table computed from cells."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.finetune import bases
from benchmarks.finetune.bases import judge
from benchmarks.finetune.cell import facts, plan, run_cell
from benchmarks.finetune.methods import FLOW, METHODS, Method
from benchmarks.finetune.study import STUDY
from benchmarks.finetune.tasks import MAIN, TASKS, BenchTask
from benchmarks.study import train_once
from benchmarks.study_table import tabulate
from robopolicy.training.compose import compose_config

POINT_MASS = BenchTask(
    *("point_mass", "toy/point_mass", {"flow": 4}),
    **dict.fromkeys(("env_steps", "replay_steps", "published_steps"), 600),
    steps_per_update=32,
    num_envs=8,
    rollout=16,
)


def test_every_method_has_settings_in_its_preset():
    for method in METHODS.values():
        assert method.preset(), method.name


def test_cells_run_from_the_main_tasks_to_the_published_update_ratios():
    keys = [key for key in STUDY.cell_keys() if key[0] in METHODS]
    assert len(keys) == len(set(keys)) and keys[0] == ("reinflow", "lift", 1)
    main = [key for key in keys if key[1] in MAIN and not METHODS[str(key[0])].published]
    assert keys[: len(main)] == main and all(METHODS[str(key[0])].published for key in keys[-20:])
    assert {key[2] for key in keys if key[:2] == ("expo", "lift")} == set(range(1, 9))
    assert {key[2] for key in keys if key[:2] == ("expo", "drawer")} == set(range(1, 6))
    assert {key[1] for key in keys if key[0] == "reinflow"} == set(TASKS) and ("dqc", "hopper", 1) not in keys


def test_rows_with_published_update_ratios_change_only_ratios_ensembles_and_candidates():
    for method in METHODS.values():
        if method.published:
            row = METHODS[method.name.removesuffix("-published")]
            assert method.settings[: len(row.settings)] == row.settings
            settings = compose_config([*method.choices, "task=manipulation/lift", *method.settings])
            assert settings.algorithm["utd"] >= 4


def test_methods_with_a_doubled_budget_run_twice_the_steps():
    usual, doubled = (plan(METHODS["dppo"], TASKS[task], None, None) for task in ("drawer", "lift"))
    assert "budget.env_steps=450000" in usual and "budget.env_steps=900000" in doubled


@pytest.fixture
def small_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bases, "WORK", tmp_path / "shared")
    monkeypatch.setattr(bases, "EPISODES", 4)
    monkeypatch.setattr(bases, "CLONES", 2)
    monkeypatch.setattr(
        bases, "train_once", lambda folder, *settings: train_once(folder, *settings, "budget.updates=5")
    )
    return tmp_path / "cell"


@pytest.mark.parametrize(
    ("success", "tried", "chosen"),
    [
        ({10: 0.5}, [10], 10),
        ({10: 0.2, 12: 0.3, 14: 0.45}, [10, 12, 14], 14),
        ({10: 0.9, 8: 0.35, 9: 0.8}, [10, 8, 9], 8),
        ({10: 0.1, 12: 0.1, 14: 0.2, 16: 0.2, 19: 0.3}, [10, 12, 14, 16, 19], 19),
    ],
)
def test_the_number_of_demonstrations_brings_the_clone_into_the_range(tmp_path, monkeypatch, success, tried, chosen):
    seen = []

    def clone(base, task, seed, count):
        seen.append(count)
        return count

    monkeypatch.setattr(bases, "WORK", tmp_path)
    monkeypatch.setattr(bases, "clone", clone)
    monkeypatch.setattr(bases, "held_out", lambda count, *_, **__: SimpleNamespace(success=np.array([success[count]])))
    task = BenchTask("a", "toy/a", {"flow": 10})
    for _ in range(2):  # the second call reads what the first wrote
        assert bases.demonstration_count(task, 0, "flow") == chosen
    assert seen == tried


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
    known = facts(method, POINT_MASS, 0)
    cell = known | run_cell(method, POINT_MASS, 0, small_work)
    assert (cell["base"] is None) == (method.base is None)
    assert cell["finetuned"]["n"] == 4
    least, most = (
        (1, 1200) if method.base else (1200, POINT_MASS.replay_steps * method.budget_multiple(POINT_MASS.name))
    )
    assert least <= cell["env_steps"] <= most
    assert 0 <= cell["seconds_updating"] <= cell["seconds"] > 0
    checkpoints = small_work / "run/checkpoints"
    assert judge(checkpoints / "best", POINT_MASS.task) == cell["finetuned"]
    assert judge(checkpoints / "last", POINT_MASS.task) == cell["last"]


@pytest.mark.slow
def test_the_same_policy_is_evaluated_once(small_work: Path, monkeypatch: pytest.MonkeyPatch):
    method = Method("reinflow", "reinflow", FLOW)
    run_cell(method, POINT_MASS, 0, small_work)
    base = bases.base_policy(FLOW, POINT_MASS, 0)
    copied = small_work / "copied"
    shutil.copytree(base, copied)
    known = judge(base, POINT_MASS.task)
    monkeypatch.setattr(bases, "evaluate", lambda *_, **__: pytest.fail("played again"))
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


def test_results_are_compared_with_their_base_over_seeds():
    cells = [cell(seed, 0.5 + 0.02 * seed, 0.9 + 0.01 * seed, 400.0 if seed % 2 else None) for seed in range(1, 6)]
    entries = {entry.method: entry for entry in tabulate(STUDY, cells).entries}
    assert list(entries) == ["flow", "reinflow"] and entries["flow"].runs.means[1] == pytest.approx(0.52)
    verdict = entries["reinflow"].verdict
    assert verdict and verdict.verdict == "ahead" and verdict.comparison and verdict.comparison.paired
    assert verdict.comparison.difference.estimate == pytest.approx(0.37)
    row = tabulate(STUDY, cells).rows()[1]
    assert row["baseline"] == "flow" and row["last"] == "56.0%" and row["steps to 90 %"] == "400 (3 of 5)"
    never = tabulate(STUDY, [cell(seed, 0.5, 0.6, None) for seed in range(1, 6)]).rows()[1]
    assert never["steps to 90 %"] == "> 1,000 (0 of 5)"


def test_a_run_that_diverges_is_a_failure_and_its_base_is_not():
    cells = [cell(seed, 0.5, 0.9, 400.0) for seed in range(1, 6)]
    for each in cells[:3]:
        del each["finetuned"], each["last"]
        each |= {"key": ["reinflow", "lift", each["seed"]], "diverged": "The loss is not finite."}
    base, row = tabulate(STUDY, cells).rows()
    assert base["seeds"] == "5 of 13" and str(base["score [95 %]"]).startswith("50.0%")
    assert row["verdict"] == "diverged: 3 of 5 runs diverged" and row["steps to 90 %"] == "400 (2 of 2)"
    assert str(row["score [95 %]"]).startswith("36.0%")


def test_clones_of_the_null_arm_are_bases_with_other_seeds():
    null = [{"method": "flow", "task": "lift", "seed": seed, "base": {"success": 0.5, "n": 100}} for seed in (101, 102)]
    (entry,) = tabulate(STUDY, null).entries
    assert entry.method == "flow" and entry.contrast is None and entry.score.n == 2
    assert ("flow", "drawer", 101) in STUDY.cell_keys()


def test_cells_with_other_settings_run_again():
    cell = {"method": "reinflow", "task": "lift", "base": None, "finetuned": {}}
    cell |= {"preset": METHODS["reinflow"].preset(), "settings": plan(METHODS["reinflow"], TASKS["lift"], None, None)}
    assert STUDY.is_current(cell)
    assert not STUDY.is_current({**cell, "settings": [*cell["settings"][:-1], "evaluation.episodes=50"]})
    assert not STUDY.is_current({**cell, "preset": {}})
    assert not STUDY.is_current({**cell, "method": "gone"})
    assert STUDY.is_current({"method": "flow", "task": "lift", "base": {}})
