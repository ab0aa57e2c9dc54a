"""Tests of the confusion of judges and of success rates corrected for it."""

import numpy as np
import pytest
from PIL import Image

from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.judge_metrics import Confusion, rogan_gladen
from robopolicy.evaluation.plots import reliability_diagram
from robopolicy.worldmodel.success_detectors.clips import reliability


def test_outcomes_and_abstentions_are_counted_separately():
    found = Confusion.from_outcomes([1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1])
    assert found == Confusion(2, 1, 1, 1, 1)
    assert found.sensitivity == wilson(2, 3) and found.specificity == wilson(1, 2)
    header, rows = found.table()
    assert rows[0][:3] == ["success", "2", "1"] and len(rows[0]) == len(header)
    assert found.to_dict()["sensitivity"]["n"] == 3


def test_a_perfect_judge_needs_no_correction():
    perfect = Confusion(500, 0, 0, 500)
    found = rogan_gladen(30, 100, perfect)
    assert found is not None and found.estimate == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx((wilson(30, 100).low, wilson(30, 100).high), abs=0.01)


def test_the_correction_by_hand_and_within_bounds():
    # sensitivity 0.8, specificity 0.9, judged rate 0.38: (0.38 + 0.9 - 1) / (0.8 + 0.9 - 1) = 0.4
    found = rogan_gladen(38, 100, Confusion(80, 20, 10, 90))
    assert found is not None and found.estimate == pytest.approx(0.4)
    wide, narrow = (rogan_gladen(380, 1000, Confusion(80 * k, 20 * k, 10 * k, 90 * k)) for k in (1, 50))
    assert wide is not None and narrow is not None and wide.high - wide.low > narrow.high - narrow.low
    low = rogan_gladen(1, 100, Confusion(80, 20, 10, 90))
    assert low is not None and low.estimate == 0 and low.low == 0


def test_perfect_judge_gives_the_jeffreys_interval():
    found = rogan_gladen(0, 10, Confusion(10**6, 0, 0, 10**6))
    assert found is not None and found.low == 0.0
    assert found.high == pytest.approx(0.217, abs=0.01)  # 97.5 % of Beta(0.5, 10.5); of a flat prior 0.285


def test_interval_coverage_is_close_to_nominal():
    rng, hits = np.random.default_rng(0), 0
    for trial in range(200):
        tp, tn = rng.binomial(60, 0.85), rng.binomial(80, 0.9)
        judged = rng.binomial(150, 0.5 * 0.85 + 0.5 * 0.1)
        found = rogan_gladen(int(judged), 150, Confusion(int(tp), int(60 - tp), int(80 - tn), int(tn)), seed=trial)
        assert found is not None
        hits += found.low <= 0.5 <= found.high
    assert 0.91 <= hits / 200 <= 0.995


def test_uninformative_judge_gives_no_correction():
    assert rogan_gladen(5, 10, Confusion(5, 5, 5, 5)) is None  # chance
    assert rogan_gladen(5, 10, Confusion(2, 8, 9, 1)) is None  # worse than chance
    assert rogan_gladen(5, 10, Confusion(5, 5, 0, 0)) is None  # no failures in the reference set


def test_the_reliability_diagram_is_written(tmp_path):
    rng = np.random.default_rng(0)
    p = rng.random(500)
    curves = {"before": reliability(p**3, rng.random(500) < p), "after": reliability(p, rng.random(500) < p)}
    with Image.open(reliability_diagram(curves, tmp_path / "reliability.png")) as image:
        assert min(image.size) > 300
