"""Tests of the composition benchmark: a complete cell on a tiny task, and the tables computed from cells."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.composition import cell as cell_module
from benchmarks.composition.cell import OPERATORS, SEARCHED, Settings, run_cell
from benchmarks.composition.table import better_parent, curve_rows, figures, plot, rows
from benchmarks.composition.tasks import TASKS, PairTask, Parent
from robopolicy.sim.registry import get_task

TINY = {"hidden": (16,), "steps": 5}
POINT_MASS = PairTask(
    "point_mass",
    "toy/point_mass",
    demonstrations=2,
    horizon=4,
    first=Parent("flow", "flow", ("state",), TINY, batch_size=16),
    second=Parent("diffusion", "diffusion", ("state",), TINY, batch_size=16),
)


def test_every_task_exists_and_its_parents_differ() -> None:
    for task in TASKS.values():
        assert get_task(task.task).make_expert is not None
        first, second = task.parents
        assert first.label != second.label
        assert (first.head, first.keys) != (second.head, second.keys)


def test_a_cell_trains_searches_evaluates_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "WORK", tmp_path)
    settings = Settings(search_episodes=2, divisions=2, episodes=4, updates=5, rounds=2)
    cell = run_cell(POINT_MASS, 0, settings)
    assert list(cell["held_out"]) == ["flow", "diffusion", *OPERATORS]
    assert all(len(found["success"]) == 4 for found in cell["held_out"].values())
    assert [point["weight"] for point in cell["curves"]["convex"]] == [0.0, 0.5, 1.0]
    assert set(cell["latency"]["ratio"]) == set(OPERATORS)
    assert sum(cell["weights"]["convex"]) == pytest.approx(1.0)
    monkeypatch.delattr(cell_module.SimEvaluator, "__call__")  # no episode may run again
    again = run_cell(POINT_MASS, 0, settings)
    assert all(again[part] == cell[part] for part in ("weights", "curves", "held_out"))


def outcomes(*successes: int) -> dict[str, Any]:
    """Blocks of 25 episodes that succeed or fail together."""
    return {"success": [value for value in successes for _ in range(25)], "return": [0.5] * 100}


def cell(seed: int, task: str = "lift") -> dict[str, Any]:
    held_out = {"a": outcomes(1, 1, 0, 0), "b": outcomes(1, 0, 0, 0)}
    held_out |= {"convex": outcomes(1, 1, 1, 0), "or": outcomes(0, 1, 0, 0), "and": outcomes(1, 1, 0, 0)}
    held_out |= {f"{name}, sde": held_out[name] for name in ("or", "and")}
    curve = [{"weight": w, "success": [int(w == 0.5)] * 50} for w in (0.0, 0.5, 1.0)]
    return {
        "task": task,
        "seed": seed,
        "parents": ["a", "b"],
        "weights": {"convex": [0.5, 0.5], "or": [1.0, 0.0], "or, sde": [1.0, 0.0]},
        "curves": dict.fromkeys(SEARCHED, curve),
        "held_out": held_out,
        "latency": {"ratio": dict.fromkeys(OPERATORS, 1.1)},
        "seconds": 10.0,
    }


def test_compositions_are_paired_with_the_better_parent_over_all_seeds() -> None:
    cells = [cell(0), cell(1), cell(2)]
    assert better_parent(cells) == "a"
    by_name = {row["policy"]: row for row in rows(cells)}
    assert str(by_name["a"]["success [95 %]"]).startswith("50.0%") and by_name["a"]["by seed"] == "50% 50% 50%"
    assert str(by_name["convex"]["minus better parent [95 %]"]).startswith("+25.0%")
    assert by_name["convex"]["gained / lost"] == "75 / 0" and by_name["or"]["gained / lost"] == "0 / 75"
    found = figures(cells)["tasks"]["lift"]["policies"]["convex"]
    assert found["n"] == 300 and found["minus_better_parent"]["low"] > 0.15 and found["latency_ratio"] == 1.1


def test_returns_select_the_better_parent_where_success_is_rare() -> None:
    one = cell(0, "push_t")
    for index, name in enumerate(one["held_out"]):
        one["held_out"][name] = {"success": [0] * 100, "return": [0.5 + 0.05 * index + 0.001 * i for i in range(100)]}
    one["curves"] = {name: [{"weight": 1.0, "return": [0.25] * 50}] for name in SEARCHED}
    assert better_parent([one]) == "b"
    convex = next(row for row in rows([one]) if row["policy"] == "convex")
    assert str(convex["minus better parent [95 %]"]).startswith("+5.0%")
    assert str(curve_rows([one])[0]["found [95 %]"]).startswith("25.0%")


def test_curve_pools_the_search_episodes_and_is_plotted(tmp_path: Path) -> None:
    cells = [cell(0), cell(1, "pick_place")]
    table = curve_rows(cells)
    assert len(table) == 2 * 3 * 3
    middle = [row for row in table if row["weight of the first"] == 0.5]
    assert all(str(row["found [95 %]"]).startswith("100.0%") and row["episodes"] == 50 for row in middle)
    assert plot(cells, tmp_path / "curve.png").stat().st_size > 1000
