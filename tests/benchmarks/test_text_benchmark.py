"""Tests of the study of text recipes: its cells, scores, and verdicts, and the choice of recipes."""

import pytest

pytest.importorskip("transformers")

from benchmarks import common
from benchmarks.study_table import tabulate
from benchmarks.text import rates
from benchmarks.text.cell import HELD_OUT, SEARCHED, problems
from benchmarks.text.mechanism import KINDS
from benchmarks.text.recipes import BASELINE, RECIPES, arms
from benchmarks.text.study import IMITATION, NULL_SEEDS, SEEDS, STUDY
from benchmarks.text.tasks import TASKS
from robopolicy.core.recipe_keys import DEFAULTS
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import SimOptions, get_task, make_sim

PROBLEMS, SAMPLES, RATE = 40, 8, 1e-3


@pytest.fixture(autouse=True)
def one_rate(monkeypatch):
    searches = {name(arm, task): search(RATE) for task in TASKS for arm in arms(task)}
    monkeypatch.setattr(rates, "finished_cells", lambda names: searches[next(iter(names)).rsplit("-", 1)[0]])


def name(arm, task):
    return f"text_rates/{arm}-{task}"


def search(better, successes=(3, 5)):
    """Cells of the search of an arm, of which one rate is better."""
    worse, best = successes
    return [{**cell("grpo", 0, best if rate == better else worse), "lr": rate} for rate in rates.RATES]


def stage(eighths):
    return {"greedy": [1] * PROBLEMS, "wins": [eighths] * PROBLEMS, "entropy": 0.5, "length": 3.0}


def cell(recipe, seed, eighths, task="arithmetic", reason=""):
    return {
        "recipe": recipe,
        "task": task,
        "seed": seed,
        "budget": TASKS[task].tokens,
        "lr": RATE,
        "samples": SAMPLES,
        "base": stage(1),
        "after": stage(eighths),
        "tokens": 1000,
        "updates": 5,
        "seconds": 10.0,
        "curve": [[0, 0.125], [1000, eighths / SAMPLES]],
        "training": {"degenerate": 0.25},
        "mechanism": {"kind": "advantage", "share": 0.0 if reason else 1.0, "difference": 0.5, "reason": reason},
    }


CELLS = [
    *(cell(BASELINE, seed, 4 + seed % 2) for seed in (*SEEDS, *NULL_SEEDS)),
    *(cell("ppo", seed, 6 + seed % 2) for seed in SEEDS),
    *(cell("rloo", seed, 2 + seed % 2) for seed in SEEDS),
    *(cell("dapo", seed, 3 + seed % 2, reason="its loss has the gradient of a clipped surrogate") for seed in SEEDS),
    *(cell("opo", seed, 4) for seed in (1, 2)),
]


def found():
    return {entry.method: entry for entry in tabulate(STUDY, CELLS).entries}


def test_verdicts_are_paired_over_seeds_and_need_a_mechanism():
    entries = found()
    verdicts = {name: entry.verdict for name, entry in entries.items() if entry.verdict is not None}
    assert {name: verdict.verdict for name, verdict in verdicts.items()} == {
        "ppo": "ahead",
        "rloo": "behind",
        "dapo": "not applicable",
        "opo": "too few seeds",
    }
    comparison = verdicts["ppo"].comparison
    assert comparison is not None and comparison.paired and comparison.difference.estimate == pytest.approx(0.25)
    assert verdicts["dapo"].reason == "its loss has the gradient of a clipped surrogate"


def test_the_imitated_policies_are_a_row_and_more_seeds_of_the_baseline_are_the_null_arm():
    entries, table = found(), tabulate(STUDY, CELLS)
    assert entries[IMITATION].score.estimate == 0.125 and entries[IMITATION].score.n == 20
    assert table.null is not None and table.null.seeds == 10 and table.null.table <= 0.1


def test_rows_describe_answers_and_training():
    (row,) = [row for row in tabulate(STUDY, CELLS).rows() if row["method"] == "dapo"]
    assert row["mechanism acts"] == "0%" and row["groups of equal reward"] == "25%" and row["clipped"] == "-"
    assert STUDY.describe(CELLS[0]) == "12% -> 62%"


def test_cells_with_another_number_of_tokens_run_again():
    assert STUDY.is_current(CELLS[0]) and not STUDY.is_current({**CELLS[0], "budget": 1})
    assert STUDY.quick().is_current({**CELLS[0], "budget": 6_000, "lr": rates.RATES[-1]})
    assert len(STUDY.quick().cell_keys()) == 2


def test_cells_with_another_learning_rate_run_again(monkeypatch):
    monkeypatch.setattr(rates, "finished_cells", lambda names: search(3e-4))
    assert not STUDY.is_current(CELLS[0]) and STUDY.is_current({**CELLS[0], "lr": 3e-4})
    monkeypatch.setattr(rates, "finished_cells", lambda names: search(3e-4)[:1])
    assert rates.found_rate("ppo", "arithmetic") is None and not STUDY.is_current(cell("ppo", 1, 4))


def test_the_better_rate_is_chosen_and_the_larger_one_of_equals():
    assert rates.chosen_rate(search(3e-4)) == 3e-4 and rates.chosen_rate(search(1e-3)) == 1e-3
    assert rates.chosen_rate(search(3e-4, (5, 5))) == 1e-3
    row = rates.rows()[0]
    assert (row["arm"], row["before"], row["0.001"], row["chosen"]) == ("grpo", "12.5%", "62.5%", "0.001")


def test_the_first_cell_of_an_arm_runs_its_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(rates, "finished_cells", common.finished_cells)
    ran = []

    def run_cell(arm, task, seed, *, tokens, lr, first=HELD_OUT):
        assert first == (SEARCHED if seed == 0 else HELD_OUT)
        ran.append((seed, lr))
        return {**cell(arm, seed, 5 if lr == 3e-4 else 4, task), "lr": lr}

    monkeypatch.setattr("benchmarks.text.cell.run_cell", run_cell)
    lr = [STUDY.run(("ppo", "arithmetic", seed), tmp_path)["lr"] for seed in (1, 2)]
    assert lr == [3e-4, 3e-4] and ran == [(0, 1e-3), (0, 3e-4), (1, 3e-4), (2, 3e-4)]


@pytest.mark.parametrize("name", TASKS)
def test_rates_are_chosen_on_other_problems_than_the_evaluation(name):
    task = make_sim(TASKS[name].task, SimOptions(num_envs=1)).task
    seeds = [problems(task, first) for first in (HELD_OUT, SEARCHED)]
    evaluated, searched = ({task.content(task.held_out_seed(seed)) for seed in side} for side in seeds)
    assert len(evaluated) == len(searched) == 200 and not evaluated & searched


def test_recipes_learn_from_rollouts_of_existing_tasks():
    for name, row in RECIPES.items():
        assert row.task in TASKS and row.mechanism in KINDS and row.against in arms(row.task)
        assert read_recipe(name).get("data", DEFAULTS["data"]) == "rollout"
    assert all(get_task(task.task) for task in TASKS.values()) and BASELINE not in RECIPES


def test_the_baseline_and_the_null_arm_run_first():
    keys = STUDY.cell_keys()
    first = len(TASKS) * (len(SEEDS) + len(NULL_SEEDS))
    assert {arm for arm, *_ in keys[:first]} == {BASELINE} and BASELINE not in {arm for arm, *_ in keys[first:]}
    assert len(keys) == len(set(keys)) and ("gigpo", "pits", 1) in keys
    assert STUDY.cell_name(keys[0]) == "text/grpo-arithmetic-1"
