"""Tests of the composition benchmark: a complete cell on a tiny task, and the tables computed from cells."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.composition import cell as cell_module
from benchmarks.composition.cell import AGAIN, ENSEMBLE, OPERATORS, SEARCHED, Settings, run_cell
from benchmarks.composition.table import better_parent, curve_rows, figures, notes, plot, rows
from benchmarks.composition.tasks import TASKS, PairTask, Parent
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
    monkeypatch.setattr(cell_module, "WORK", tmp_path)
    settings = Settings(search_episodes=2, divisions=2, episodes=4, updates=5, rounds=2)
    cell = run_cell(POINT_MASS, 0, settings)
    assert list(cell["held_out"]) == ["flow", "diffusion", *OPERATORS, AGAIN, ENSEMBLE]
    assert all(len(found["success"]) == 4 for found in cell["held_out"].values())
    assert [point["weight"] for point in cell["curves"]["convex"]] == [0.0, 0.5, 1.0]
    assert set(cell["latency"]["ratio"]) == set(OPERATORS)
    assert len(cell["disagreement"]) == 10 and min(cell["disagreement"]) > 0
    assert sum(cell["weights"]["convex"]) == pytest.approx(1.0)
    monkeypatch.delattr(cell_module.SimEvaluator, "__call__")  # no episode may run again
    again = run_cell(POINT_MASS, 0, settings)
    assert all(again[part] == cell[part] for part in ("weights", "curves", "held_out"))


def outcomes(*successes: int) -> dict[str, Any]:
    """Blocks of 25 episodes that succeed or fail together."""
    return {"success": [value for value in successes for _ in range(25)]}


def cell(seed: int, task: str = "lift", disagreement: float = 0.5) -> dict[str, Any]:
    held_out = {"a": outcomes(1, 1, 0, 0), "b": outcomes(1, 0, 0, 0), AGAIN: outcomes(1, 1, 0, 0)}
    held_out |= {"convex": outcomes(1, 1, 1, 0), "or": outcomes(0, 1, 0, 0), "and": outcomes(1, 1, 0, 0)}
    held_out |= {f"{name}, sde": held_out[name] for name in ("or", "and")} | {ENSEMBLE: outcomes(1, 1, 0, 0)}
    curve = [{"weight": w, "success": [int(w == 0.5)] * 50} for w in (0.0, 0.5, 1.0)]
    return {
        "task": task,
        "seed": seed,
        "parents": ["a", "b"],
        "weights": {"convex": [0.5, 0.5], "or": [1.0, 0.0], "or, sde": [1.0, 0.0]},
        "curves": dict.fromkeys(SEARCHED, curve),
        "held_out": held_out,
        "disagreement": [disagreement] * 10,
        "latency": {"ratio": dict.fromkeys(OPERATORS, 1.1)},
        "seconds": 10.0,
    }


def test_compositions_are_compared_with_the_better_parent_over_seeds() -> None:
    cells = [cell(seed) for seed in range(5)]
    assert better_parent(cells) == "a"
    by_name = {row["policy"]: row for row in rows(cells)}
    assert str(by_name["a"]["success [95 %]"]).startswith("50.0%") and by_name["a"]["by seed"] == " ".join(["50%"] * 5)
    assert str(by_name["convex"]["difference [95 %]"]).startswith("+25.0%")
    assert by_name["convex"]["verdict"] == "ahead" and by_name["or"]["verdict"] == "behind"
    assert by_name["convex"]["gained / lost"] == "125 / 0" and by_name["or"]["gained / lost"] == "0 / 125"
    found = figures(cells)["tasks"]["lift"]["policies"]["convex"]
    assert found["success"]["n"] == 5 and found["latency_ratio"] == 1.1


def test_the_null_arm_is_compared_with_its_original() -> None:
    cells = [cell(seed) for seed in range(5)]
    assert next(row for row in rows(cells) if row["policy"] == AGAIN)["verdict"] == "level"
    assert notes(cells)[0].startswith("Null arm: 0 of 1 parents")
    assert "differ by 50% at noise" in notes(cells)[1]


def test_parents_that_agree_along_the_path_give_no_verdict() -> None:
    cells = [cell(seed, disagreement=0.01) for seed in range(5)]
    assert next(row for row in rows(cells) if row["policy"] == "convex")["verdict"] == "not applicable"


def test_curve_pools_the_search_episodes_and_is_plotted(tmp_path: Path) -> None:
    cells = [cell(0), cell(1, "pick_place")]
    table = curve_rows(cells)
    assert len(table) == 2 * 3 * 3
    middle = [row for row in table if row["weight of the first"] == 0.5]
    assert all(str(row["success [95 %]"]).startswith("100.0%") and row["episodes"] == 50 for row in middle)
    assert plot(cells, tmp_path / "curve.png").stat().st_size > 1000
