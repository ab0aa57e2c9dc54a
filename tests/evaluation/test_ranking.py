"""Tests of ranking metrics over policies against hand-computed numbers, SIMPLER's published table and scipy."""

import json

import numpy as np
import pytest
from PIL import Image

from robopolicy.errors import UserError
from robopolicy.evaluation import ranking
from robopolicy.evaluation.plots import rank_scatter
from robopolicy.evaluation.ranking import (
    calibration_slope,
    cohen_kappa,
    kendall,
    mmrv,
    pairwise_accuracy,
    pearson,
    prediction_powered,
    rank,
    spearman,
    top1_regret,
)
from robopolicy.evaluation.result import Cost, EvalResult

# Success of RT-2-X, RT-1 (converged, 15 %, X, begin) and Octo on robot and in SIMPLER (Li et al. 2024, table I).
PICK_CAN = ([0.907, 0.853, 0.920, 0.760, 0.133, 0.293], [0.787, 0.857, 0.710, 0.567, 0.027, 0.170])
MOVE_NEAR = ([0.733, 0.633, 0.583, 0.450, 0.017, 0.350], [0.779, 0.442, 0.354, 0.317, 0.050, 0.042])


def results(success: np.ndarray, first: int = 0, seeded: bool = True) -> dict[str, EvalResult]:
    """Results of policies with the given outcomes `(P, n)`."""
    n = success.shape[1]
    cost = Cost(1, n, n, n, 1.0)
    binary = success.dtype == np.bool_
    return {
        f"p{i}": EvalResult(
            "toy", first + np.arange(n), row.astype(float), np.ones(n, int), row if binary else None, cost, seeded
        )
        for i, row in enumerate(success)
    }


def graded(policies: int, n: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of policies of evenly graded skill, and predictions of which a fraction `noise` is random."""
    rng = np.random.default_rng(seed)
    real = rng.random((policies, n)) < np.linspace(0.05, 0.95, policies)[:, None]
    predicted = np.where(rng.random((policies, n)) < noise, rng.random((policies, n)) < 0.5, real)
    return real, predicted


@pytest.mark.parametrize(("table", "violation", "r"), [(PICK_CAN, 0.031, 0.976), (MOVE_NEAR, 0.111, 0.855)])
def test_metrics_reproduce_the_published_simpler_table(table, violation, r):
    assert mmrv(*table) == pytest.approx(violation, abs=5e-4)
    assert pearson(*table) == pytest.approx(r, abs=1.5e-3)  # the table's rates are rounded


def test_metrics_of_three_policies_equal_hand_computed_values():
    real, predicted = [0.2, 0.5, 0.9], [0.3, 0.8, 0.7]
    assert mmrv(real, predicted) == pytest.approx((0 + 0.4 + 0.4) / 3)
    assert pairwise_accuracy(real, predicted) == pytest.approx(2 / 3)
    assert kendall(real, predicted) == pytest.approx(1 / 3)
    assert spearman(real, predicted) == pytest.approx(0.5)  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
    assert top1_regret(real, predicted) == pytest.approx(0.4)
    assert calibration_slope(real, [0.1, 0.25, 0.45]) == pytest.approx(2.0)


def test_ties_are_strict_in_mmrv_and_count_half_in_pairwise_accuracy():
    real, tied = [0.0, 1.0], [0.5, 0.5]
    assert mmrv(real, tied) == 0.5  # the better policy is not preferred: a violation; the worse is not: correct
    assert pairwise_accuracy(real, tied) == 0.5
    assert top1_regret(real, tied) == 0.5
    assert mmrv(real, real) == 0 and np.isnan(pearson(real, tied))
    assert np.isnan(pairwise_accuracy(tied, real))  # no pair to order


def test_constant_values_have_zero_spread_despite_rounding_of_the_mean():
    constant = [0.1, 0.1, 0.1]
    assert np.mean(constant) != 0.1
    assert np.isnan(pearson(constant, [1, 2, 3])) and np.isnan(calibration_slope([1, 2, 3], constant))


def test_correlations_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.integers(0, 6, 9) / 5, rng.integers(0, 6, 9) / 5  # many ties
        assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
        assert kendall(a, b) == pytest.approx(stats.kendalltau(a, b).statistic)


def test_batched_metrics_equal_the_metrics_of_each_row():
    rng = np.random.default_rng(1)
    a, b = rng.random((4, 6)), rng.random((4, 6))
    for metric in ranking.OF_MEANS.values():
        assert metric(a, b) == pytest.approx([float(metric(x, y)) for x, y in zip(a, b, strict=True)])


def test_kappa_equals_the_hand_computed_value():
    # 20 both, 15 neither, 5 and 10 only one: agreement 0.7, chance 0.5 (Cohen 1960)
    assert cohen_kappa(0.7, 0.5, 0.6) == pytest.approx(0.4)
    assert np.isnan(cohen_kappa(1.0, 1.0, 1.0))  # no failure on either side: chance agreement is 1 too


def test_prediction_powered_interval_equals_hand_computed_values_and_covers():
    interval = prediction_powered([1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 1, 1])
    assert interval.estimate == pytest.approx(0.75 + 0.75 - 1.0)
    assert interval.high - interval.estimate == pytest.approx(1.96 * np.sqrt(0.25 / 4 + 0.1875 * 8 / 7 / 8), rel=1e-3)
    rng = np.random.default_rng(0)
    hits, widths = 0, []
    for _ in range(400):
        starts = rng.random(440)
        real, guess = starts < 0.6, (starts < 0.75) ^ (rng.random(440) < 0.05)  # optimistic with a little noise
        found = prediction_powered(real[:40], guess[:40], guess[40:])
        hits += found.low <= 0.6 <= found.high
        widths.append(found.high - found.low)
    assert 0.91 <= hits / 400 <= 0.98
    assert np.mean(widths) < 0.95 * 2 * 1.96 * np.sqrt(0.24 / 40)  # narrower than with 40 real episodes alone


def test_perfect_predictions_score_perfectly_and_random_predictions_do_not():
    real, _ = graded(10, 60, 0.0)
    perfect = rank(results(real), results(real)).metrics
    for key, value in {"pearson": 1, "spearman": 1, "mmrv": 0, "pairwise": 1, "regret": 0, "slope": 1}.items():
        assert perfect[key].estimate == pytest.approx(value), key
        assert perfect[key].low == pytest.approx(perfect[key].high) == pytest.approx(value), key
    assert perfect["bias"].estimate == 0 and perfect["kappa"].estimate == 1 and perfect["significant"].estimate == 1
    uninformed = rank(results(real), results(graded(10, 60, 1.0)[1])).metrics
    assert uninformed["pearson"].low < 0 < uninformed["pearson"].high
    assert abs(uninformed["kappa"].estimate) < 0.1 and uninformed["mmrv"].estimate > 0.2


def test_significant_pairs_are_ordered_better_than_all_pairs():
    real, predicted = graded(10, 50, 0.5)
    metrics = rank(results(real), results(predicted)).metrics
    assert metrics["significant"].estimate > metrics["pairwise"].estimate
    assert metrics["pearson"].low < metrics["pearson"].estimate < metrics["pearson"].high


def test_intervals_cover_the_correlation_of_many_policies_and_episodes():
    skills = np.random.default_rng(0).random((20_000, 2))
    truth = pearson(skills.mean(1), 0.5 * skills[:, 0] + 0.25)
    hits = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        a = rng.random((12, 2))
        real = rng.random((12, 200)) < a.mean(1)[:, None]
        predicted = rng.random((12, 200)) < (0.5 * a[:, 0] + 0.25)[:, None]
        interval = rank(results(real), results(predicted, first=1000), resamples=300, seed=seed).metrics["pearson"]
        hits += interval.low <= truth <= interval.high
    assert hits >= 48  # >= 80 %; a percentile bootstrap of 12 policies covers slightly less than 95 %


def test_few_policies_yield_a_note_and_only_metrics_without_order():
    real, predicted = graded(4, 30, 0.2)
    found = rank(results(real), results(predicted))
    assert set(found.metrics) == {"bias", "kappa"}
    assert "Not enough policies" in found.notes[0] and "at least 5" in found.notes[0]


def test_extra_predicted_starts_give_prediction_powered_values():
    real, predicted = graded(6, 400, 0.2)
    found = rank(results(real[:, :50]), results(predicted))
    assert found.powered is not None and found.values()[0][-1] == "real and predicted"
    expected = prediction_powered(real[3, :50], predicted[3, :50], predicted[3, 50:])
    assert found.powered[3] == expected and "kappa" not in found.metrics
    assert len(found.values()[1]) == 6 and len(found.table()[1]) == len(found.metrics)


def test_returns_are_ranked_like_success():
    rng = np.random.default_rng(0)
    real = np.arange(6)[:, None] + rng.normal(size=(6, 40))
    found = rank(results(real), results(2 * real - 3))
    assert found.metrics["pearson"].estimate == pytest.approx(1)
    assert found.metrics["slope"].estimate == pytest.approx(0.5)
    assert "kappa" not in found.metrics


def test_bootstrap_is_reproducible_and_the_dictionary_plain():
    real, predicted = graded(6, 30, 0.3)
    first, second = (rank(results(real), results(predicted), seed=3).to_dict() for _ in range(2))
    assert first == second and set(first["policies"]["p0"]) == {"real", "predicted", "powered"}


def test_undefined_metrics_yield_a_note_and_json_null():
    real = np.ones((5, 4), np.bool_)
    found = rank(results(real), results(real))
    assert any("Pearson r: undefined" in note for note in found.notes)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["metrics"]["pearson"]["estimate"] is None and content["metrics"]["mmrv"]["estimate"] == 0


def test_the_scatter_plot_is_written(tmp_path):
    real, predicted = graded(6, 30, 0.3)
    path = rank_scatter(rank(results(real), results(predicted)), tmp_path / "scatter.png")
    with Image.open(path) as image:
        assert min(image.size) > 300


def test_unseeded_episodes_are_not_paired():
    real, predicted = graded(6, 30, 0.3)
    found = rank(results(real, seeded=False), results(predicted))
    assert "kappa" not in found.metrics and "significant" not in found.metrics and "pearson" in found.metrics


def test_incomparable_results_are_refused():
    real, predicted = graded(5, 20, 0.3)
    with pytest.raises(UserError, match="same policies"):
        rank(results(real), results(predicted[:4]))
    with pytest.raises(UserError, match="with and without success"):
        rank(results(real), results(predicted.astype(float)))
    mixed = results(real) | {"p0": results(real, first=7)["p0"]}
    with pytest.raises(UserError, match="different episodes"):
        rank(mixed, results(predicted))


def rates(*values: float) -> np.ndarray:
    """Outcomes `(P, 40)` of policies that succeed in the first episodes."""
    return np.arange(40) < 40 * np.array(values)[:, None]


@pytest.mark.parametrize(
    ("real", "predicted", "passed", "reason"),
    [
        ((1.0, 0.5, 0.0), (0.6, 0.4, 0.1), True, "distinguishes p0 1 in reality and 0.6 predicted, p2 0 in"),
        ((1.0, 0.0), (0.05, 0.0), False, "does not distinguish p0 1 in reality and 0.05 predicted, p1 0 in"),
        ((1.0, 0.5, 0.0), (0.4, 0.9, 0.0), False, "reverses 1 of 3 pairs that differ in reality, among them p0 and p1"),
        ((0.0, 1.0), (1.0, 0.0), False, "does not distinguish p1 1 in reality"),
        ((0.5, 0.525), (1.0, 0.0), None, "add expert and random"),
    ],
)
def test_a_ranking_ends_in_a_verdict(real, predicted, passed, reason):
    found = rank(results(rates(*real)), results(rates(*predicted)))
    assert found.passed is passed and reason in found.verdict
    assert found.to_dict()["verdict"] == found.verdict
