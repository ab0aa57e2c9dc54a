"""Test of the table that compares asynchronous with synchronous rollouts."""

import pytest

pytest.importorskip("transformers")

from benchmarks.asynchronous import rows


def cell(mode, seed, rate, correct):
    after = [1] * correct + [0] * (100 - correct)
    return {"mode": mode, "seed": seed, "tokens_per_second": rate, "staleness": 0.9, "base": 0.4, "after": after}


def test_rates_are_compared_per_seed():
    cells = [cell("synchronous", 1, 100.0, 50), cell("synchronous", 2, 50.0, 60)]
    cells += [cell("processes-1", 1, 150.0, 50), cell("processes-1", 2, 100.0, 70), cell("thread-1", 3, 9.0, 1)]
    plain, thread, processes = rows(cells)
    assert plain["against synchronous"] == "1.00x" and str(plain["accuracy"]).startswith("55.0%")
    assert processes["against synchronous"] == "1.75x" and processes["seeds"] == 2
    assert thread["against synchronous"] == "-"
