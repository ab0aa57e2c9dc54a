"""Tests of the text benchmark: verdicts, null arm, rows and figures from cells, and the choice of recipes."""

import pytest

pytest.importorskip("transformers")

from benchmarks.text.cell import SAMPLES
from benchmarks.text.mechanism import KINDS
from benchmarks.text.plot import plot
from benchmarks.text.recipes import BASELINE, NULL, RECIPES, arms
from benchmarks.text.runner import cell_keys, cell_name
from benchmarks.text.table import BASE, figures, notes, null_arm, rows, runs, verdicts
from benchmarks.text.tasks import TASKS
from robopolicy.core.recipe_keys import DEFAULTS
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import get_task

PROBLEMS = 40


def stage(accuracy):
    wins = [round(accuracy * SAMPLES)] * PROBLEMS
    return {"greedy": [1] * PROBLEMS, "wins": wins, "entropy": 0.5, "length": 3.0}


def cell(arm, seed, accuracy, task="arithmetic", reason=""):
    return {
        "recipe": arm,
        "task": task,
        "seed": seed,
        "base": stage(0.125),
        "after": stage(accuracy),
        "tokens": 1000,
        "updates": 5,
        "cpu_seconds": 10.0,
        "curve": [[0, 0.125], [1000, accuracy]],
        "training": {"degenerate": 0.25},
        "mechanism": {"kind": "advantage", "share": 0.0 if reason else 1.0, "difference": 0.5, "reason": reason},
    }


SEEDS = range(1, 11)
EIGHTHS = [4, 5, 4, 5, 4, 5, 4, 5, 4, 5]  # of successes of the baseline, by seed
CELLS = [
    *(cell(BASELINE, seed, eighths / 8) for seed, eighths in zip(SEEDS, EIGHTHS, strict=True)),
    *(cell(NULL, seed, eighths / 8) for seed, eighths in zip(SEEDS, reversed(EIGHTHS), strict=True)),
    *(cell("ppo", seed, (eighths + 2) / 8) for seed, eighths in zip(SEEDS, EIGHTHS, strict=True)),
    *(cell("rloo", seed, (eighths - 2) / 8) for seed, eighths in zip(SEEDS, EIGHTHS, strict=True)),
    *(
        cell("dapo", seed, eighths / 8, reason="its loss is the same")
        for seed, eighths in zip(SEEDS, EIGHTHS, strict=True)
    ),
    *(cell("opo", seed, 0.5) for seed in (1, 2)),
]


def test_verdicts_are_paired_over_seeds_and_need_a_mechanism():
    found = {arm: verdict for (_, arm), verdict in verdicts(CELLS).items()}
    assert {arm: verdict.verdict for arm, verdict in found.items()} == {
        NULL: "level",
        "ppo": "ahead",
        "rloo": "behind",
        "dapo": "not applicable",
        "opo": "too few seeds",
    }
    comparison = found["ppo"].comparison
    assert comparison is not None and comparison.paired and comparison.difference.estimate == pytest.approx(0.25)
    assert found["dapo"].reason == "its loss is the same"


def test_a_mechanism_must_act_in_half_of_the_cells():
    half = [cell("gpg", seed, 0.5, reason="no" if seed > 5 else "") for seed in SEEDS]
    assert runs(half, "arithmetic", "gpg").reason == ""
    assert runs([*half, cell("gpg", 11, 0.5, reason="no")], "arithmetic", "gpg").reason == "no"


def test_the_null_arm_counts_differences_between_runs_of_the_baseline():
    found = verdicts(CELLS)
    rate = null_arm(CELLS, found)
    assert rate is not None and rate.seeds == 10 and rate.table <= 0.1
    assert null_arm(CELLS[:9], found) is None  # nine runs of the baseline are too few for two groups of five
    assert notes(CELLS)[0].startswith("Null arm: 500 tables") and notes(CELLS)[1].startswith("- `opo` on arithmetic")


def test_rows_show_the_difference_and_its_verdict():
    table = {row["recipe"]: {key: str(value) for key, value in row.items()} for row in rows(CELLS)}
    assert table[BASE]["accuracy"].startswith("12.5%") and table[BASE]["verdict"] == "-"
    assert table[BASELINE]["accuracy"].startswith("56.2%") and table[BASELINE]["seeds"] == "10"
    assert table["ppo"]["difference"].startswith("+25.0%") and table["ppo"]["verdict"] == "ahead"
    assert table["dapo"]["mechanism acts"] == "0%" and table["dapo"]["difference"] == "-"
    assert table[BASELINE]["dead groups"] == "0.250" and table[BASELINE]["clipped"] == "-"


def test_figures_have_curves_and_seeds():
    found = figures(CELLS)["arithmetic"]
    assert found["ppo"]["curve"] == [[0.0, 0.125], [1000.0, pytest.approx(0.8125)]]
    assert found["ppo"]["by_seed"]["1"] == 0.75 and found["ppo"]["against"] == BASELINE
    assert found["ppo"]["accuracy"]["low"] < 0.8125 < found["ppo"]["accuracy"]["high"]
    assert "curve" not in found[BASE] and "rft" not in found


def test_a_plot_is_written_for_several_tasks(tmp_path):
    both = [*CELLS, *({**one, "task": "pits"} for one in CELLS if one["recipe"] in (BASELINE, NULL))]
    assert plot(figures(both), tmp_path / "text.png").stat().st_size > 10_000


def test_recipes_learn_from_rollouts_of_existing_tasks():
    for name, row in RECIPES.items():
        assert row.task in TASKS and row.mechanism in KINDS and row.against in arms(row.task)
        assert read_recipe(name).get("data", DEFAULTS["data"]) == "rollout"
    assert all(get_task(task.task) for task in TASKS.values())
    assert NULL not in RECIPES and BASELINE not in RECIPES


def test_the_baseline_and_the_null_arm_run_first():
    keys = cell_keys(["arithmetic", "pits"], [1, 2])
    assert {arm for arm, *_ in keys[:8]} == {BASELINE, NULL} and ("gigpo", "pits", 1) in keys
    assert len(keys) == len(set(keys)) == 2 * (len(arms("arithmetic")) + len(arms("pits")))
    assert cell_keys(["pits"], [3], ["hgpo"]) == [("hgpo", "pits", 3)]
    assert cell_name(keys[0]) == f"text/{keys[0][0]}-arithmetic-1"
