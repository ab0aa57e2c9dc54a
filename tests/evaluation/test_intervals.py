"""Tests of intervals against published and hand-computed numbers."""

import math

import numpy as np
import pytest

from robopolicy.evaluation.intervals import (
    bootstrap_mean,
    correlation_mean,
    iqm,
    paired_difference,
    paired_rates,
    sample_warning,
    sign_flip_test,
    sign_test,
    student_mean,
    wilson,
)


def test_an_interval_of_one_observation_is_written_as_its_estimate():
    assert f"{student_mean([0.25])}" == "0.25" and f"{student_mean([0.25]):+.1%}" == "+25.0%"


def test_an_interval_is_cut_to_the_range_of_its_quantity():
    wide = student_mean([0.5, 0.9])
    assert wide.low < 0 and wide.high > 1
    cut = wide.within(0, 1)
    assert (cut.estimate, cut.low, cut.high, cut.n) == (wide.estimate, 0, 1, 2)
    assert math.isnan(student_mean([0.25]).within(0, 1).low)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, table I, method 3 (score without continuity correction), and Wilson for 8 of 10
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (8, 10, 0.4902, 0.9433),
    ],
)
def test_wilson_matches_published_intervals(successes, n, low, high):
    interval = wilson(successes, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(n - successes, n)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((interval.low, interval.high))


def test_wilson_is_exact_at_the_ends_and_refuses_invalid_counts():
    assert wilson(0, 5).low == 0.0 and wilson(5, 5).high == 1.0
    for bad in ((3, 2), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="successes"):
            wilson(*bad)


@pytest.mark.parametrize("method", ["bca", "percentile"])
def test_bootstrap_of_a_mean_agrees_with_the_normal_interval(method):
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    interval = bootstrap_mean(values, method=method)
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert interval.estimate == values.mean()
    assert (interval.low, interval.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_bca_shifts_towards_the_long_tail():
    values = np.random.default_rng(1).exponential(size=60)
    plain, bca = (bootstrap_mean(values, method=method) for method in ("percentile", "bca"))
    assert bca.low > plain.low and bca.high > plain.high


def test_bootstrap_coverage_is_close_to_nominal():
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        interval = bootstrap_mean(rng.exponential(size=40), resamples=400, seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_bootstrap_of_constant_and_single_values():
    assert bootstrap_mean([2.0, 2.0, 2.0]).low == 2.0
    single = bootstrap_mean([2.0])
    assert single.estimate == 2.0 and math.isnan(single.low) and math.isnan(single.high)


@pytest.mark.parametrize(
    ("values", "quantile"),  # of Student's distribution with n - 1 degrees of freedom, from any table
    [([1, 3], 12.7062), ([1, 2, 3], 4.3027), ([2, 4, 4, 6], 3.1824), ([1, 2, 3, 4, 5], 2.7764), (range(10), 2.2622)],
)
def test_the_mean_of_a_few_seeds_has_students_interval(values, quantile):
    data = np.array(values, dtype=float)
    half = quantile * math.sqrt(((data - data.mean()) ** 2).sum() / (len(data) - 1) / len(data))
    interval = student_mean(values)
    assert (interval.estimate, interval.n) == (data.mean(), len(data))
    assert (interval.low, interval.high) == pytest.approx((data.mean() - half, data.mean() + half), rel=1e-4)
    assert student_mean([1, 3], level=0.5).high == pytest.approx(2 + 1.0)  # quantile 1, standard error 1


def test_the_mean_of_correlations_has_students_interval_on_fishers_scale():
    interval = correlation_mean([0.9, 0.8])  # arctanh: 1.4722 and 1.0986; mean 1.2854, half width 12.7062 * 0.1868
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.8579, -0.7963, 0.9987), abs=1e-4)
    assert correlation_mean([1.0, 1.0, 1.0]).low == pytest.approx(1.0, abs=1e-5)


def test_one_seed_has_no_interval_and_zero_seeds_are_refused():
    single = student_mean([3.0])
    assert single.estimate == 3.0 and math.isnan(single.low) and math.isnan(single.high)
    with pytest.raises(ValueError, match="at least one value"):
        student_mean([])


def test_iqm_is_the_mean_of_the_middle_half():
    assert iqm([1, 2, 3, 4, 5, 6, 7, 1000]) == pytest.approx(4.5)
    assert iqm([7.0]) == 7.0


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 0, 1.0), (5, 5, 1.0), (10, 0, 2 / 1024), (9, 1, 22 / 1024)])
def test_sign_test_is_the_exact_binomial(wins, losses, p):
    assert sign_test(wins, losses) == pytest.approx(p) == sign_test(losses, wins)


def test_paired_difference_is_tighter_than_separate_intervals():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=100)  # difficulty of the episode, common to both policies
    result = paired_difference(hard, hard + 0.1 + 0.05 * rng.normal(size=100))
    assert result.difference.low > 0.08 and result.p_value < 1e-3 and result.is_distinct
    assert bootstrap_mean(hard).high > bootstrap_mean(hard + 0.1).low


def test_paired_difference_of_successes_is_mcnemar():
    first = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0], dtype=bool)
    second = np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 0], dtype=bool)
    result = paired_difference(first, second)
    assert (result.wins, result.losses, result.ties) == (5, 1, 4)
    assert result.p_value == pytest.approx(2 * (1 + 6) / 64)
    assert result.difference.estimate == pytest.approx(0.4)


def test_a_difference_of_successes_is_distinct_only_if_the_exact_test_agrees():
    first = np.arange(100) < 40
    result = paired_difference(first, first | (np.arange(100) >= 95))
    assert result.difference.low > 0 and result.p_value == pytest.approx(2 / 32) and not result.is_distinct


def test_the_test_of_returns_is_about_their_mean():
    second = np.where(np.arange(100) < 45, 1.0, -0.2)
    result = paired_difference(np.zeros(100), second)
    assert (result.wins, result.losses) == (45, 55) and result.p_value < 1e-3 and result.is_distinct
    assert paired_difference(second, second).p_value == 1 and sign_flip_test(np.array([1.0, -1.0])) == 1


def test_the_sign_flip_test_has_the_stated_level():
    rng = np.random.default_rng(0)
    found = [sign_flip_test(rng.exponential(size=20) * rng.choice([-1, 1], 20), resamples=199) for _ in range(400)]
    assert 0.025 < np.mean(np.array(found) <= 0.05) < 0.08


@pytest.mark.parametrize(
    ("table", "low", "high"),
    # both, only second, only first, neither; Newcombe 1998 (paired), and Fagerland et al. 2014 on airway data
    [((36, 12, 2, 0), 0.0569, 0.3404), ((1, 7, 1, 12), 0.0256, 0.5069)],
)
def test_paired_rates_match_published_intervals(table, low, high):
    interval = paired_rates(*table)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    both, second, first, neither = table
    swapped = paired_rates(both, first, second, neither)
    assert (-swapped.high, -swapped.low) == pytest.approx((interval.low, interval.high))


def test_a_positive_correlation_of_pairs_is_reduced_by_half_an_episode():
    interval = paired_rates(20, 5, 2, 13)  # 22 and 25 of 40; (20 * 13 - 5 * 2 - 40 / 2) / sqrt(22 * 18 * 25 * 15)
    correlation, first, second = 230 / math.sqrt(148_500), wilson(22, 40), wilson(25, 40)
    below, above = second.estimate - second.low, first.high - first.estimate
    reach = math.sqrt(below**2 - 2 * correlation * below * above + above**2)
    assert interval.estimate == pytest.approx(0.075)
    assert interval.low == pytest.approx(0.075 - reach, abs=1e-12)


def test_paired_interval_of_successes_is_not_empty_when_every_pair_agrees():
    won = paired_difference(np.zeros(30, dtype=bool), np.ones(30, dtype=bool)).difference
    assert won.estimate == 1.0 and 0.8 < won.low < 0.9 and won.high == 1.0
    same = paired_difference(np.ones(30, dtype=bool), np.ones(30, dtype=bool)).difference
    assert same.low < 0 < same.high


def test_few_episodes_give_a_warning_with_the_uncertainty():
    assert sample_warning(100) is None
    assert sample_warning(20).startswith("Only 20 episodes: a success rate near 50 % is uncertain by ±20 points")
    assert sample_warning(1, rate=False) == "Only 1 episode: the interval of the return is rough; use at least 100."
