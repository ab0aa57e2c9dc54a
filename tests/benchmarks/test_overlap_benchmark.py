"""Tests of the benchmark of overlapped simulation: the change of the return."""

from benchmarks.overlap import rows
from robopolicy.evaluation.intervals import student_mean

RATIO = {"value": 1.2, "low": 1.1, "high": 1.3}
TIMES = {"alternating_ms": 2.0, "overlap_ms": 2.4, "simulating": 0.4, "wall": RATIO, "cpu": RATIO}


def test_the_change_of_the_return_has_an_interval_over_the_seeds() -> None:
    changes = {1: -8.0, 2: -4.0, 3: 87.0, 4: 95.0, 5: -91.0}
    cells = [
        {"case": "ppo", "overlap": overlap, "seed": seed, "return": 10.0 * seed + overlap * change}
        for seed, change in changes.items()
        for overlap in (0, 1)
    ]
    unpaired = {"case": "ppo", "overlap": 1, "seed": 6, "return": 1e6}
    (row,) = rows({"ppo": TIMES}, [*cells, unpaired])
    assert row["seeds"] == 5
    assert row["change of the return"] == f"{student_mean(list(changes.values())):+.0f}"


def test_cases_without_runs_have_no_return() -> None:
    (row,) = rows({"sac_64": TIMES}, [])
    assert (row["seeds"], row["return"], row["change of the return"]) == (0, "-", "-")
