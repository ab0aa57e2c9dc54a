"""Tests of the SAC benchmark: paired repetitions."""

import pytest

from benchmarks import sac_vs_sb3
from benchmarks.sac_vs_sb3 import HALF, OURS, THEIRS, Settings


def test_ratios_are_paired_per_processor() -> None:
    rates = {OURS: [30.0, 60.0, 30.0], HALF: [40.0, 80.0, 40.0], THEIRS: [20.0, 40.0, 20.0]}
    other = {**rates, OURS: [20.0, 40.0, 20.0]}
    cells = [{"processor": "one", "rates": rates}, {"processor": "other", "rates": other}]
    rows, figures = sac_vs_sb3.summarise(cells, Settings())
    assert figures["one"][OURS]["ratio"] == {"value": 1.5, "low": 1.5, "high": 1.5}
    assert figures["one"][HALF]["ratio"]["value"] == 2.0
    assert [row["updates/s, one"] for row in rows] == ["30, 1.50x [1.50, 1.50]", "40, 2.00x [2.00, 2.00]", "20, 1.00x"]
    assert str(rows[0]["updates/s, other"]).startswith("20, 1.00x")


@pytest.mark.slow
def test_all_learners_are_timed_on_the_same_replay() -> None:
    pytest.importorskip("stable_baselines3")
    rates = sac_vs_sb3.measure_rates(Settings(), repetitions=2, updates=2)
    assert set(rates) == {OURS, HALF, THEIRS}
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
