"""Tests of the text benchmark: rows, figures and verdicts computed from cells, and the set of online recipes."""

import pytest

pytest.importorskip("transformers")

from benchmarks.text.cell import TASKS, online_recipes
from benchmarks.text.claims import CLAIMS, QUANTITIES, Claim, difference, verdict
from benchmarks.text.plot import plot
from benchmarks.text.runner import cell_name
from benchmarks.text.table import figures, refusals, rows, twin
from robopolicy.recipe_files import recipe_names
from robopolicy.sim.registry import get_task

SAMPLES = 16


def stage(correct, wins=(0, 4, 16, 8), entropy=0.5, **measures):
    return {"correct": correct, "n": 100, "wins": list(wins), "samples": SAMPLES, "entropy": entropy, **measures}


def cell(recipe, seed, after, task="arithmetic", **training):
    common = {"recipe": recipe, "task": task, "seed": seed, "base": stage(30, length=3.0)}
    if isinstance(after, str):
        return common | {"refused": after}
    measured = {"tokens": 1000, "updates": 5, "cpu_seconds": 10.0, "training": {"degenerate": 0.25, **training}}
    return common | {"refused": None, **measured, "after": after}


CELLS = [
    *(cell("reinforce", seed, stage(40 + seed)) for seed in (1, 2, 3)),
    *(cell("grpo", seed, stage(70 + 2 * seed), informative=0.5) for seed in (1, 2, 3)),
    *(cell("dapo", seed, stage(70, entropy=0.5 + (-1) ** seed)) for seed in (1, 2, 3)),
    *(cell("dr_grpo", seed, stage(70), informative=0.8 + 0.01 * seed) for seed in (1, 2, 3)),
    *(cell("kl_cov", seed, stage(70, entropy=0.3 - 0.01 * seed)) for seed in (1, 2, 3)),
    *(cell("rloo", seed, stage(70, wins=(4 + seed, 4, 16, 8))) for seed in (1, 2, 3)),
    cell("gspo", 1, stage(75)),
    cell("ppo", 1, "no critic"),
]


def test_rows_pool_seeds_and_refusals_are_listed():
    table = {row["recipe"]: row for row in rows(CELLS)}
    assert table["(imitation)"]["accuracy"].startswith("30.0%") and table["(imitation)"]["verdict"] == "-"
    assert table["grpo"]["seeds"] == 3 and table["grpo"]["accuracy"].startswith("74.0%")
    assert table["grpo"]["dead groups"] == "0.250" and table["grpo"]["format"] == "-"
    assert "ppo" not in table
    assert refusals(CELLS) == ["- `ppo`: not on arithmetic. no critic."]
    elsewhere = [*CELLS, cell("ppo", 1, stage(75), task="grid")]
    assert refusals(elsewhere) == ["- `ppo`: not on arithmetic, plays grid. no critic."]


def test_every_claim_has_a_verdict_with_an_interval(monkeypatch):
    monkeypatch.setitem(CLAIMS, "dr_grpo", Claim("informative rows"))
    monkeypatch.setitem(CLAIMS, "rloo", Claim("hard prompts"))
    found = {row["recipe"]: (row["claim"], row["verdict"]) for row in rows(CELLS)}
    assert found["grpo"] == ("more accuracy than reinforce", "confirmed")
    assert found["dapo"] == ("more entropy than grpo", "not seen at this scale")
    assert found["dr_grpo"] == ("more informative rows than grpo", "confirmed")
    assert found["kl_cov"] == ("more entropy than grpo", "the opposite at this scale")
    assert found["rloo"] == ("more hard prompts than grpo", "confirmed")  # the base never solves the first prompt
    assert found["gspo"] == ("more accuracy than grpo", "1 of 3 seeds")
    gap = figures(CELLS)["arithmetic"]["grpo"]["claim"]["difference"]  # 31, 32 and 33 points
    assert gap["estimate"] == pytest.approx(0.32)
    assert gap["high"] - gap["low"] == pytest.approx(2 * 4.3026527 * 0.01 / 3**0.5)


def test_recipes_with_identical_results_are_reported():
    identical = [*CELLS, *(cell("opo", seed, stage(70 + 2 * seed)) for seed in (1, 2))]
    assert twin("opo", identical) == "grpo" and twin("grpo", identical) is None
    found = {row["recipe"]: row["verdict"] for row in rows(identical)}
    assert found["opo"] == "here the same as grpo" and found["grpo"] == "confirmed"
    different = [*identical, cell("opo", 3, stage(70))]
    assert twin("opo", different) is None


def test_unmeasured_quantities_are_reported():
    claim = Claim("tool calls", larger=False)
    own, other = cell("gspo", 1, stage(50)), cell("grpo", 1, stage(50))
    assert verdict(claim, difference(claim, [own], [other])) == "not measured"
    calls = [
        [cell(name, s, stage(50, calls=mean + 0.01 * s)) for s in (1, 2, 3)] for name, mean in (("a", 0.2), ("b", 0.7))
    ]
    assert verdict(claim, difference(claim, *calls)) == "confirmed"
    fewer = Claim("tokens", larger=False)
    longer = [[cell(name, s, stage(50, length=size + s)) for s in (1, 2, 3)] for name, size in (("a", 9.0), ("b", 3.0))]
    assert verdict(fewer, difference(fewer, *longer)) == "the opposite at this scale"


def test_figures_have_intervals_and_gains():
    found = figures(CELLS)["arithmetic"]
    assert found["grpo"]["gain"] == pytest.approx(0.44)
    assert found["grpo"]["accuracy"]["low"] < 0.74 < found["grpo"]["accuracy"]["high"]
    assert found["ppo"] == {"refused": "no critic"} and found["grpo"]["pass@1"] == pytest.approx(28 / 64)


def test_plot_is_written_for_several_tasks(tmp_path):
    both = [*CELLS, *({**cell, "task": "countdown"} for cell in CELLS if cell["recipe"] in ("grpo", "dapo"))]
    path = plot(figures(both), tmp_path / "text.png")
    assert path.stat().st_size > 10_000


def test_claims_refer_to_existing_recipes_and_quantities():
    names = set(recipe_names())
    assert set(CLAIMS) | {claim.against for claim in CLAIMS.values()} <= names
    assert {claim.quantity for claim in CLAIMS.values()} <= set(QUANTITIES)


def test_only_online_recipes_are_in_the_table():
    names = online_recipes()
    assert "grpo" in names and "dpo" not in names and "sft" not in names
    assert all(get_task(task.task) for task in TASKS.values())
    assert all(set(task.recipes) <= set(names) for task in TASKS.values())
    assert TASKS["waypoints"].plays("ppo") and not TASKS["waypoints"].plays("dapo")
    assert cell_name(("grpo", "arithmetic", 1)) == "text/grpo-arithmetic-1"
