"""The table of the text benchmark: from cells to rows and figures, and which recipes are played."""

import pytest

pytest.importorskip("transformers")

from benchmarks.text.cell import TASKS, online_recipes
from benchmarks.text.runner import cell_name
from benchmarks.text.table import figures, rows
from robopolicy.sim.registry import get_task


def stage(correct, entropy=0.5):
    rate = {"value": correct / 100, "low": 0.0, "high": 1.0}
    return {"correct": correct, "n": 100, "pass_at": {"1": rate, "8": {**rate, "value": 0.9}}, "entropy": entropy}


def cell(recipe, seed, after):
    played = {"tokens": 1000, "updates": 5, "degenerate": 0.25, "seconds": 10.0, "after": stage(after, 0.2)}
    common = {"recipe": recipe, "task": "arithmetic", "seed": seed, "base": stage(30)}
    return common | ({"refused": "no critic"} if after is None else {"refused": None, **played})


CELLS = [cell("grpo", 1, 70), cell("grpo", 2, 80), {**cell("ppo", 1, 1), "refused": "no critic"}]


def test_rows_pool_seeds_and_list_what_is_refused():
    base, grpo, ppo = rows(CELLS)
    assert base["recipe"] == "(imitation)" and base["accuracy"].startswith("30.0%")
    assert grpo["seeds"] == 2 and grpo["accuracy"].startswith("75.0%") and grpo["dead groups"] == "25%"
    assert ppo["recipe"] == "ppo (refused)" and ppo["accuracy"] == "-"


def test_figures_have_intervals_and_gains():
    found = figures(CELLS)["arithmetic"]
    assert found["grpo"]["gain"] == pytest.approx(0.45)
    assert found["grpo"]["accuracy"]["low"] < 0.75 < found["grpo"]["accuracy"]["high"]
    assert found["ppo"] == {"refused": "no critic"}


def test_only_recipes_that_play_are_in_the_table():
    names = online_recipes()
    assert "grpo" in names and "dpo" not in names and "sft" not in names
    assert all(get_task(task.task) for task in TASKS.values())
    assert cell_name(("grpo", "arithmetic", 1)) == "text/grpo-arithmetic-1"
