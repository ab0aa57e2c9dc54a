"""Tests of the benchmark of control from scratch: complete cells on tiny budgets, and the table computed from cells."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_rules import check_control_row_starts

from benchmarks import common, parallel
from benchmarks.control import cell as cell_module
from benchmarks.control.cell import run_cell
from benchmarks.control.methods import FAMILIES, LEFT_OUT, METHODS, OFF_POLICY, ON_POLICY, Family, notes
from benchmarks.control.runner import run_all
from benchmarks.control.table import figures, plot, rows
from benchmarks.control.tasks import TASKS
from benchmarks.themes import contributed
from docs.generate_methods import load
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.sim.registry import get_task

OWN = sorted(METHODS.keys() - contributed("control", "methods").keys() - {family.baseline for family in FAMILIES})


def test_every_from_scratch_algorithm_has_a_row_or_is_excluded():
    families = ("On-policy", "Off-policy", "Exploration")
    from_scratch = {row.name for row in load().algorithms if row.family in families}
    assert from_scratch - set(METHODS) <= set(LEFT_OUT) <= set(ALGORITHMS) - set(METHODS)
    assert {name for name, method in METHODS.items() if not method.is_baseline} <= set(ALGORITHMS)
    assert all(get_task(task.task) for task in TASKS.values())
    assert all(METHODS[family.baseline].is_baseline for family in FAMILIES)


@pytest.mark.parametrize("name", OWN)
def test_every_row_can_start_with_its_budget(name: str):
    check_control_row_starts(name)


def test_notes_list_the_excluded_algorithms():
    assert all(any(f"`{name}`" in line for line in notes()) for name in LEFT_OUT)


def test_scores_are_normalised_between_random_and_expert():
    hopper = TASKS["hopper"]
    assert (hopper.score(hopper.random), hopper.score(hopper.expert)) == (0.0, 1.0)


SMALL = {
    ON_POLICY: replace(ON_POLICY, num_envs=4, rollout=8),
    OFF_POLICY: replace(OFF_POLICY, warmup=40, batch_size=16, capacity=1000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sb3_ppo", "sac", "sb3_sac"])
def test_a_cell_trains_evaluates_and_records_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(cell_module, "WORK", tmp_path)
    monkeypatch.setattr(cell_module, "EPISODES", 2)
    monkeypatch.setattr(cell_module, "CURVE_EPISODES", 2)
    method = replace(METHODS[name], family=SMALL[METHODS[name].family])
    cell = run_cell(method, TASKS["hopper"], 0, steps=320)
    steps = [point[0] for point in cell["curve"]]
    assert 10 <= len(steps) <= 12 and steps == sorted(steps) and steps[-1] == cell["env_steps"] == 320
    assert np.isfinite(cell["return"]) and cell["seconds"] > 0


@pytest.mark.parametrize("name", ["ppo", "sb3_ppo"])
def test_a_diverged_run_is_a_cell_with_the_random_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(cell_module, "WORK", tmp_path)
    monkeypatch.setattr(cell_module, "CURVE_EPISODES", 2)
    monkeypatch.setattr(cell_module, "make_ppo", diverging(cell_module.make_ppo))
    method = replace(METHODS[name], family=SMALL[ON_POLICY], settings=("algorithm.lr=1e30",))
    found = run_cell(method, TASKS["hopper"], 0, steps=320)
    assert found["return"] == TASKS["hopper"].random
    assert "diverged" in found["diverged"]


def diverging(make: Any) -> Any:
    """Wrap a factory of Stable-Baselines3 models so that their weights overflow."""

    def made(*arguments: Any) -> Any:
        model = make(*arguments)
        model.lr_schedule = lambda _: 1e30
        return model

    return made


def test_a_cell_with_another_budget_is_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(parallel, "parallel_map", lambda run, keys, jobs: [(key, done(cells_of[key])) for key in keys])
    fresh = cell("sac", OFF_POLICY, "hopper", 0, 1.0) | {"env_steps": OFF_POLICY.env_steps}
    cells_of = {("sac", "hopper", seed): fresh | {"seed": seed, "return": 2.0} for seed in (0, 1)}
    common.save_cell("control/sac-hopper-0", fresh)
    common.save_cell("control/sac-hopper-1", fresh | {"seed": 1, "env_steps": 3000})
    found = run_all(list(cells_of), jobs=1, steps={}, keep=True)
    assert [run["return"] for run in found] == [1.0, 2.0]


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def cell(method: str, family: Family, task: str, seed: int, value: float) -> dict[str, Any]:
    curve = [(1000 * step, value * step / 3) for step in (1, 2, 3)]
    common = {"method": method, "family": family.name, "task": task, "seed": seed, "env_steps": 3000, "seconds": 9.0}
    return {**common, "return": value, "diverged": "", "curve": curve}


def cells(**values: float) -> list[dict[str, Any]]:
    """Five seeds of each method on two tasks, with slightly different returns."""
    return [
        cell(name, METHODS[name].family, task, seed, value + seed)
        for name, value in values.items()
        for task in ("hopper", "walker2d")
        for seed in range(5)
    ]


def test_learners_are_ahead_level_or_behind_their_own_baseline():
    found = cells(sb3_ppo=1000.0, ppo=1000.0, gorl=1100.0, fpo=900.0, sb3_sac=50.0, sac=500.0)
    numbers = figures(found)
    table = {row["method"]: row for row in rows(numbers)}
    verdicts = {name: row["verdict"] for name, row in table.items()}
    assert verdicts == {
        "sb3_ppo": "-",
        "gorl": "ahead",
        "fpo": "behind",
        "ppo": "level",
        "sb3_sac": "-",
        "sac": "ahead",
    }
    assert (table["gorl"]["seeds"], table["gorl"]["hopper"], table["gorl"]["half_cheetah"]) == (5, "1102", "-")
    better = numbers[ON_POLICY.name]["methods"]["ppo"]["better_than_baseline"]
    assert better["low"] < better["value"] == 0.5 < better["high"]


def test_too_few_runs_have_no_verdict():
    found = figures([run for run in cells(sb3_sac=50.0, sac=500.0) if run["seed"] < 2])
    assert {row["verdict"] for row in rows(found)} == {"-"}
    assert found[OFF_POLICY.name]["methods"]["sac"]["better_than_baseline"] is None


def test_tasks_with_runs_of_only_one_side_are_ignored():
    found = [run for run in cells(sb3_sac=500.0, sac=500.0) if (run["method"], run["task"]) != ("sb3_sac", "hopper")]
    assert {row["method"]: row["verdict"] for row in rows(figures(found))}["sac"] == "level"


def test_diverged_runs_count_and_are_reported():
    found = cells(sb3_sac=500.0, sac=500.0)
    for run in found:
        if run["method"] == "sac" and run["seed"] > 0:
            run |= {"return": TASKS[run["task"]].random, "diverged": "NaN", "curve": []}
    row = {row["method"]: row for row in rows(figures(found))}["sac"]
    assert (row["diverged"], row["verdict"]) == (8, "behind")


def test_a_score_weights_tasks_equally_and_reports_their_number():
    found = [run for run in cells(sac=500.0) if run["task"] == "hopper" or run["seed"] < 2]
    mine = figures(found)[OFF_POLICY.name]["methods"]["sac"]
    fair = figures([run for run in found if run["seed"] < 2])[OFF_POLICY.name]["methods"]["sac"]
    assert mine["score"] == fair["score"]
    assert (mine["tasks"], mine["seeds"], len(mine["returns"]["hopper"])) == (2, 2, 5)


def test_without_a_common_seed_there_is_no_score():
    found = [run for run in cells(sac=500.0) if (run["task"] == "hopper") == (run["seed"] < 2)]
    row = rows(figures(found))[0]
    assert (row["score, IQM [95 %]"], row["tasks"]) == ("-", 0)


def test_curves_are_plotted_with_the_baseline(tmp_path: Path):
    found = cells(sb3_ppo=1000.0, ppo=1000.0, gorl=1100.0)
    assert plot(found, ON_POLICY, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert plot(found, OFF_POLICY, tmp_path / "none.png") is None
