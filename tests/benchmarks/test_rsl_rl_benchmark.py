"""Tests of the rsl_rl comparison: times are paired by seed and returns are pooled."""

from typing import Any

import pytest

from benchmarks.rsl_rl import LEARNERS, summarise


def cell(learner: str, seed: int, outside: float, score: float | None) -> dict[str, Any]:
    times = {"simulating": 2.0, "updating": 0.3 * outside, "outside": outside}
    return {"learner": learner, "env_id": "Balance", "seed": seed, "envs": 64, "return": score, **times}


def test_ratio_is_the_median_over_seeds() -> None:
    ours, reference, threaded = LEARNERS
    outside = {ours: (0.3, 0.5, 0.2), reference: (0.6, 0.5, 0.5), threaded: (0.5, 0.9, 0.8)}
    cells = [cell(name, seed, outside[name][seed], 100.0 + seed) for seed in range(3) for name in LEARNERS]
    rows, figures = summarise(cells)
    assert figures["Balance"]["outside_ratio"] == pytest.approx({"value": 0.6, "low": 0.4, "high": 1.0})
    assert figures["Balance"][ours]["iqm"] == pytest.approx(101.0)
    assert [row["learner"] for row in rows] == list(LEARNERS)
    assert rows[0]["time outside of the simulator / rsl_rl"] == "0.60 [0.40, 1.00]"


def test_runs_without_a_return_report_only_times() -> None:
    rows, figures = summarise([cell(name, 0, 1.0, None) for name in LEARNERS])
    assert all(row["return, IQM [95 %]"] == "-" for row in rows) and "iqm" not in figures["Balance"]["rsl_rl"]
