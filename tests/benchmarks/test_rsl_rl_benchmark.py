"""Tests of the rsl_rl comparison: times are paired by seed and returns are pooled."""

from typing import Any

import pytest

from benchmarks.rsl_rl import ALL_CORES, LEARNERS, OURS, summarise

BALANCE = "Mjlab-Cartpole-Balance"


def cell(learner: str, seed: int, outside: float, score: float | None) -> dict[str, Any]:
    times = {"simulating": 2.0, "updating": 0.3 * outside, "outside": outside}
    return {"learner": learner, "env_id": BALANCE, "seed": seed, "envs": 64, "return": score, **times}


def test_ratio_is_the_median_over_seeds() -> None:
    ours, reference, threaded = LEARNERS
    outside = {ours: (0.3, 0.5, 0.2), reference: (0.6, 0.5, 0.5), threaded: (0.5, 0.9, 0.8)}
    cells = [cell(name, seed, outside[name][seed], 20.0 + seed) for seed in range(3) for name in LEARNERS]
    rows, figures = summarise(cells)
    assert figures[BALANCE]["outside_ratio"] == pytest.approx({"value": 0.6, "low": 0.4, "high": 1.0})
    assert figures[BALANCE][ours]["iqm"] == pytest.approx(21.0)
    assert [row["learner"] for row in rows] == list(LEARNERS)
    assert rows[0]["time outside of the simulator / rsl_rl"] == "0.60 [0.40, 1.00]"


def test_runs_without_a_return_report_only_times() -> None:
    rows, figures = summarise([cell(name, 0, 1.0, None) for name in LEARNERS])
    assert all(row["return, IQM [95 %]"] == "-" for row in rows) and "iqm" not in figures[BALANCE]["rsl_rl"]


def test_returns_stay_within_their_range_and_a_second_run_of_the_same_policies_has_none() -> None:
    cells = [cell(name, seed, 1.0, score) for seed, score in enumerate((49.0, 12.0, 47.0)) for name in LEARNERS]
    rows, figures = summarise(cells)
    assert rows[0]["return, IQM [95 %]"] == "36 [0, 50]"
    assert (figures[BALANCE][OURS]["low"], figures[BALANCE][OURS]["high"]) == (0.0, 50.0)
    assert [row["learner"] for row in rows if row["return, IQM [95 %]"] == "-"] == [ALL_CORES]
