"""Tests of the benchmark of control from scratch: complete cells on tiny budgets, and the table computed from cells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_rules import check_control_row_starts

from benchmarks.control import cell as cell_module
from benchmarks.control.cell import run_cell
from benchmarks.control.methods import FAMILIES, LEFT_OUT, METHODS, OFF_POLICY, ON_POLICY, notes
from benchmarks.control.study import STUDY
from benchmarks.control.tasks import TASKS
from benchmarks.control_million.study import ControlMillion
from benchmarks.study import ALL
from benchmarks.study_settings import recorded
from benchmarks.study_table import tabulate
from benchmarks.themes import contributed
from docs.generate_methods import load
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.sim.registry import get_task
from robopolicy.training.guards import TrainingDiverged

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
    ON_POLICY: replace(ON_POLICY, num_envs=4, rollout=8, env_steps=320),
    OFF_POLICY: replace(OFF_POLICY, warmup=40, batch_size=16, capacity=1000, env_steps=320),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sb3_ppo", "sac", "sb3_sac"])
def test_a_cell_trains_evaluates_and_records_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(cell_module, "EPISODES", 2)
    monkeypatch.setattr(cell_module, "CURVE_EPISODES", 2)
    method = replace(METHODS[name], family=SMALL[METHODS[name].family])
    cell = run_cell(method, TASKS["hopper"], 0, tmp_path)
    steps = [point[0] for point in cell["curve"]]
    assert 10 <= len(steps) <= 12 and steps == sorted(steps) and 300 < steps[-1] <= 320
    assert np.isfinite(cell["return"]) and cell["seconds"] > 0


@pytest.mark.parametrize("name", ["ppo", "sb3_ppo"])
def test_a_diverged_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(cell_module, "CURVE_EPISODES", 2)
    monkeypatch.setattr(cell_module, "make_ppo", diverging(cell_module.make_ppo))
    method = replace(METHODS[name], family=SMALL[ON_POLICY], settings=("algorithm.lr=1e30",))
    with pytest.raises(TrainingDiverged, match="diverged"):
        run_cell(method, TASKS["hopper"], 0, tmp_path)


def diverging(make: Any) -> Any:
    """Wrap a factory of Stable-Baselines3 models so that their weights overflow."""

    def made(*arguments: Any) -> Any:
        model = make(*arguments)
        model.lr_schedule = lambda _: 1e30
        return model

    return made


def cell(method: str, task: str, seed: int, value: float) -> dict[str, Any]:
    family = METHODS[method].family
    curve = [(1000 * step, value * step / 3) for step in (1, 2, 3)]
    common = {"method": method, "family": family.name, "task": task, "seed": seed, "seconds": 9.0}
    return {**common, "env_steps": family.env_steps, "return": value, "curve": curve}


def cells(**values: float) -> list[dict[str, Any]]:
    """Five seeds of each method on all tasks, with slightly different returns."""
    return [
        cell(name, task, seed, value + seed)
        for name, value in values.items()
        for task in STUDY.tasks
        for seed in range(5)
    ]


def verdicts(found: list[dict[str, Any]]) -> dict[str, str | None]:
    """Method -> verdict over all tasks."""
    entries = [entry for entry in tabulate(STUDY, found).entries if entry.task == ALL]
    return {entry.method: entry.verdict and entry.verdict.verdict for entry in entries}


def test_learners_are_ahead_level_or_behind_their_own_baseline():
    found = cells(sb3_ppo=1000.0, ppo=1000.5, gorl=1100.0, fpo=900.0, sb3_sac=50.0, sac=500.0)
    expected = {"sb3_ppo": None, "gorl": "ahead", "fpo": "behind", "ppo": "level", "sb3_sac": None, "sac": "ahead"}
    assert verdicts(found) == expected
    assert verdicts([run for run in found if run["seed"] < 4])["sac"] == "too few seeds"


def test_a_learner_without_a_task_has_no_score_over_all_tasks():
    found = [run for run in cells(sb3_sac=500.0, sac=500.0) if (run["method"], run["task"]) != ("sac", "hopper")]
    assert verdicts(found) == {"sb3_sac": None}


def test_runs_that_diverge_on_most_seeds_are_called_diverged():
    found = cells(sb3_sac=500.0, sac=500.0)
    for run in found:
        if run["method"] == "sac" and run["seed"] > 1:
            run |= {"key": [run["method"], run["task"], run["seed"]], "diverged": "NaN"}
            del run["return"], run["curve"]
    assert verdicts(found)["sac"] == "diverged"
    (row,) = [row for row in tabulate(STUDY, found).rows() if (row["method"], row["task"]) == ("sac", ALL)]
    assert row["verdict"] == "diverged: 3 of 5 runs diverged" and row["seeds"] == "5, 3 diverged"
    hopper = {entry.seeds: entry.runs.means for entry in tabulate(STUDY, found).entries if entry.task == "hopper"}
    assert hopper["5, 3 diverged"][2] == TASKS["hopper"].random


def test_cells_with_another_budget_run_again():
    found = cell("sac", "hopper", 0, 1.0)
    assert STUDY.is_current(found) and not STUDY.is_current(found | {"env_steps": 3000})
    small = STUDY.quick()
    assert small.is_current(found | {"env_steps": 2000}) and len(small.cell_keys()) == 4


def test_the_study_of_a_million_steps_has_the_cells_of_its_families():
    study = ControlMillion()
    keys = study.cell_keys()
    assert len([key for key in keys if key[0] == "sb3_ppo"]) == 4 * 10  # five seeds, and five of the null arm
    assert len([key for key in keys if key[0] == "ppo"]) == 4 * 10
    assert {key[1] for key in keys if key[0] == "td3"} == {"half_cheetah", "hopper", "ant"}
    assert study.contrasts("sac", ALL) == study.contrasts("props", "ant") == ()
    assert study.contrasts("props", ALL)[0].baseline == "sb3_ppo"
    assert study.published("td3", "hopper") is not None and study.published("ppo", "ant") is None


def test_the_study_of_a_million_steps_has_one_verdict_per_learner_and_notes_on_its_rows():
    study = ControlMillion()
    found = [
        {**cell(name, task, seed, value + 10 * seed), "env_steps": 1_000_000}
        for name, value in (("sb3_ppo", 1000.0), ("ppo", 1500.0))
        for task in study.tasks
        for seed in range(5)
    ]
    table = tabulate(study, found)
    verdicts = {(entry.method, entry.task): entry.verdict.verdict for entry in table.entries if entry.verdict}
    assert verdicts == {("ppo", ALL): "ahead"}
    notes = " ".join(table.study.notes(table.scores))
    assert "100 to 104" in notes and "bfloat16" not in notes and "`bpo`" not in notes


@pytest.mark.parametrize("name", ["fpo", "fpo_pp", "policyflow"])
def test_flow_learners_from_scratch_start_with_their_whole_learning_rate(name: str):
    assert recorded(STUDY.trainings((name, "hopper", 0)))["run"]["algorithm"]["lr_warmup"] == 0
