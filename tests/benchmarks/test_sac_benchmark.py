"""Tests of the SAC benchmark: paired repetitions and pooled seeds."""

from typing import Any

import pytest

from benchmarks import sac_vs_sb3
from benchmarks.sac_vs_sb3 import HALF, OURS, THEIRS, Settings


def test_ratios_are_paired_and_returns_pooled() -> None:
    rates = {OURS: [30.0, 60.0, 30.0], HALF: [40.0, 80.0, 40.0], THEIRS: [20.0, 40.0, 20.0]}
    cells: list[dict[str, Any]] = [
        {"learner": name, "task": "HalfCheetah-v5", "seed": seed, "return": 100.0 * seed, "seconds": 5.0}
        for name in rates
        for seed in range(3)
    ]
    rows, figures = sac_vs_sb3.summarise(
        {"one": rates, "other": {**rates, OURS: [20.0, 40.0, 20.0]}}, cells, Settings()
    )
    assert figures["one"][OURS]["ratio"] == {"value": 1.5, "low": 1.5, "high": 1.5}
    assert figures["one"][HALF]["ratio"]["value"] == 2.0
    assert [row["updates/s, one"] for row in rows] == ["30, 1.50x [1.50, 1.50]", "40, 2.00x [2.00, 2.00]", "20, 1.00x"]
    assert str(rows[0]["updates/s, other"]).startswith("20, 1.00x")
    assert figures["HalfCheetah-v5"][OURS]["seeds"] == 3
    half_done = [cell for cell in cells if cell["learner"] == HALF]
    rows, _ = sac_vs_sb3.summarise({"one": rates}, half_done, Settings())
    assert [row["return, IQM [95 %], HalfCheetah-v5"] == "-" for row in rows] == [True, False, True]


@pytest.mark.slow
def test_all_learners_are_timed_on_the_same_replay() -> None:
    pytest.importorskip("stable_baselines3")
    rates = sac_vs_sb3.measure_rates(Settings(), repetitions=2, updates=2)
    assert set(rates) == {OURS, HALF, THEIRS}
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
