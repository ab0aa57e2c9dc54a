"""Tests of the composition study: a complete cell on a tiny task, and the table computed from cells."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.composition.cell import ITSELF, OPERATORS, PARENTS, SEARCHED, Settings, SimEvaluator, run_cell
from benchmarks.composition.study import BETTER, STUDY
from benchmarks.composition.tasks import TASKS, PairTask, Parent
from benchmarks.study_table import tabulate
from robopolicy.sim.registry import get_task

TINY = {"hidden": (16,), "steps": 5}
POINT_MASS = PairTask(
    "point_mass",
    "toy/point_mass",
    horizon=4,
    first=Parent("flow", "flow", ("state",), TINY, demonstrations=2, batch_size=16),
    second=Parent("diffusion", "diffusion", ("state",), TINY, demonstrations=1, batch_size=16),
)


def test_every_task_exists_and_its_parents_differ() -> None:
    for task in TASKS.values():
        assert get_task(task.task).make_expert is not None
        first, second = task.parents
        assert first.label != second.label
        assert (first.head, first.keys, first.experiment) != (second.head, second.keys, second.experiment)


def test_a_cell_trains_searches_evaluates_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(search_episodes=2, divisions=2, episodes=4, updates=5, rounds=2)
    cell = run_cell(POINT_MASS, 0, settings, tmp_path)
    assert list(cell["held_out"]) == [*PARENTS, ITSELF, *OPERATORS]
    assert all(len(found) == 4 for found in cell["held_out"].values())
    assert [weight for weight, _ in cell["curves"]["convex"]] == [0.0, 0.5, 1.0]
    assert set(cell["latency"]["ratio"]) == set(OPERATORS) and len(cell["searched"]) == 2
    assert sum(cell["weights"]["convex"]) == pytest.approx(1.0)
    assert len(cell["disagreement"]) == 10 and min(cell["disagreement"]) > 0
    evaluated = SimEvaluator.__call__

    def parents_only(self: SimEvaluator, policy: Any, seeds: Any) -> Any:
        assert not hasattr(policy, "parents"), "a composition runs again"
        return evaluated(self, policy, seeds)

    monkeypatch.setattr(SimEvaluator, "__call__", parents_only)
    again = run_cell(POINT_MASS, 0, settings, tmp_path)
    assert all(again[part] == cell[part] for part in ("weights", "curves", "held_out", "searched"))


def test_cells_of_the_null_arm_have_only_parents(tmp_path: Path) -> None:
    cell = run_cell(POINT_MASS, 5, Settings(search_episodes=2, episodes=2, updates=3), tmp_path, composed=False)
    assert list(cell["held_out"]) == list(PARENTS)
    assert [score.method for score in STUDY.scores(cell)] == [BETTER, *PARENTS]


def outcomes(*successes: int) -> list[int]:
    """Blocks of 25 episodes that succeed or fail together."""
    return [value for value in successes for _ in range(25)]


def cell(seed: int, task: str = "lift", disagreement: float = 0.5) -> dict[str, Any]:
    shift = seed % 2  # seeds differ a little
    held_out = {PARENTS[0]: outcomes(1, 1, 0, 0), PARENTS[1]: outcomes(1, 0, 0, 0), ITSELF: outcomes(1, 1, 0, shift)}
    held_out |= {"convex": outcomes(1, 1, 1, 0), "or": outcomes(0, 1, 0, 0), "and": outcomes(1, 1, 0, shift)}
    held_out |= {f"{name}, sde": held_out[name] for name in ("or", "and")}
    return {
        "task": task,
        "seed": seed,
        "searched": [0.5, 0.25],
        "weights": {"convex": [0.5, 0.5], "or": [1.0, 0.0], "or, sde": [1.0, 0.0]},
        "curves": {name: [[weight, [int(weight == 0.5)] * 50] for weight in (0.0, 0.5, 1.0)] for name in SEARCHED},
        "held_out": held_out,
        "disagreement": [disagreement] * 10,
        "latency": {"ratio": dict.fromkeys(OPERATORS, 1.1)},
        "seconds": 10.0,
    }


def test_compositions_are_compared_with_the_parent_that_was_better_in_the_search() -> None:
    table = tabulate(STUDY, [cell(seed) for seed in range(5)])
    rows = {row["method"]: row for row in table.rows()}
    assert str(rows[BETTER]["score [95 %]"]).startswith("50.0%") and rows["convex"]["baseline"] == BETTER
    assert str(rows["convex"]["difference [95 %]"]).startswith("+25.0%")
    assert (rows["convex"]["verdict"], rows["or"]["verdict"]) == ("ahead", "behind")
    assert rows[ITSELF]["baseline"] == PARENTS[0] and rows[ITSELF]["verdict"] == "level"
    assert rows["convex"]["gained / lost"] == "125 / 0" and rows["or"]["gained / lost"] == "0 / 125"
    assert rows["convex"]["time / parents"] == "1.10" and rows["convex"]["weight of the first"] == "0.5 0.5 0.5 0.5 0.5"
    assert any("differ by 50% at noise" in line for line in table.notes())


def test_cells_of_the_null_arm_have_rows_without_times() -> None:
    alone = cell(5)
    alone["held_out"] = {name: alone["held_out"][name] for name in PARENTS}
    del alone["latency"]
    assert {row["time / parents"] for row in tabulate(STUDY, [alone]).rows()} == {"-"}


def test_parents_that_agree_along_the_path_give_no_verdict() -> None:
    rows = tabulate(STUDY, [cell(seed, disagreement=0.01) for seed in range(5)]).rows()
    verdict = next(row["verdict"] for row in rows if row["method"] == "convex")
    assert verdict == "not applicable: the parents agree along the path"


def test_success_over_the_weight_of_the_first_parent_is_the_curve_of_the_study() -> None:
    entries = {entry.method: entry for entry in tabulate(STUDY, [cell(0), cell(1)]).entries}
    curve = entries["convex"].curve()
    assert [curve[i][:2] for i in (0, 10, 20)] == [[0.0, 0.0], [0.5, 1.0], [1.0, 0.0]] and not entries["and"].curve()
