"""Tests of the weight search: known optima, common and disjoint seeds, budgets, resuming, order of the policies."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from robopolicy.errors import UserError
from robopolicy.evaluation.result import Cost, EvalResult
from robopolicy.evaluation.search.methods import (
    HalvingConfig,
    HalvingSearch,
    expected_improvement,
    lattice,
    posterior,
    ranked,
)
from robopolicy.evaluation.search.search_report import search_summary, search_table, weight_curve, write_table
from robopolicy.evaluation.search.weights import (
    SearchLog,
    check_disjoint,
    compare_with,
    evaluate_held_out,
    make_search,
    search_weights,
)

NAMES = ("b", "a", "c")  # deliberately not sorted


class Quadratic:
    """Outcomes fall with the squared distance from `best`, plus a noise per seed that all candidates share."""

    def __init__(self, best, *, luck=0.3, rate=False, seeded=True, stop_after=None):
        self.best, self.luck, self.rate, self.seeded = np.array(best), luck, rate, seeded
        self.stop_after = stop_after
        self.calls: list[tuple[tuple[float, ...], list[int]]] = []

    def __call__(self, policy, seeds):
        if self.stop_after is not None and len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((policy.weights, list(seeds)))
        height = 1 - float(np.sum((np.array(policy.weights) - self.best) ** 2))
        luck = np.array([np.random.default_rng(seed).uniform(-1, 1) for seed in seeds])
        returns = height + self.luck * luck
        success = returns > 0.8 if self.rate else None
        n = len(returns)
        cost = Cost(1, n, n, 1, 1.0)
        return EvalResult("fake/hill", np.array(seeds), returns, np.full(n, 3), success, cost, self.seeded)


def make(weights) -> Any:
    return SimpleNamespace(weights=weights)


def search(name, evaluator, parents=NAMES[:2], *, seed=100, search_log=None, **settings):
    return search_weights(make_search(name, **settings), parents, make, evaluator, seed=seed, log=search_log)


METHODS = [("grid", {}), ("halving", {"episodes": 16}), ("bayes", {})]


@pytest.fixture(params=METHODS, ids=[name for name, _ in METHODS])
def method(request):
    return request.param


def test_lattice_of_two_policies_is_a_uniform_grid_between_the_corners():
    points = lattice(2, 10)
    assert points[0] == (0.0, 1.0) and points[-1] == (1.0, 0.0)
    assert [first for first, _ in points[1:-1]] == [k / 10 for k in range(1, 10)]


def test_lattice_of_three_policies_contains_every_multiple_once():
    points = lattice(3, 4)
    assert len(points) == len(set(points)) == 15
    assert all(min(w) >= 0 and sum(w) == 1.0 for w in points)


def test_ties_are_ranked_from_the_middle_of_their_plateau():
    scores = {(k / 10, 1 - k / 10): float(2 <= k <= 6) for k in range(11)}
    assert ranked(scores)[0] == (0.4, 0.6)
    assert ranked({(0.0, 1.0): 1.0, (0.5, 0.5): 1.0, (1.0, 0.0): 0.0})[0] == (0.5, 0.5)


@pytest.mark.parametrize("best", [(0.3, 0.7), (0.9, 0.1), (1.0, 0.0)])
def test_the_optimum_between_two_policies_is_found(method, best):
    name, settings = method
    found = search(name, Quadratic(best), **settings)
    assert found.weights == pytest.approx(best, abs=0.051)


def test_the_optimum_among_three_policies_is_found(method):
    name, settings = method
    best = (0.2, 0.5, 0.3)
    found = search(name, Quadratic(best), NAMES, **settings)
    assert found.weights == pytest.approx(best, abs=0.11)


def test_search_on_noisy_success_rates_ends_close_to_the_optimum(method):
    name, settings = method
    found = search(name, Quadratic((0.6, 0.4), rate=True), **(settings | {"episodes": 60}))
    assert found.weights == pytest.approx((0.6, 0.4), abs=0.21)


def test_all_candidates_of_a_round_share_their_seeds(method):
    name, settings = method
    evaluator = Quadratic((0.3, 0.7))
    found = search(name, evaluator, **settings)
    by_seed: dict[int, set[tuple[float, ...]]] = {}
    for weights, seeds in evaluator.calls:
        assert len(seeds) == len(set(seeds))
        for seed in seeds:
            by_seed.setdefault(seed, set()).add(weights)
    assert set(by_seed) == set(found.seeds)
    rounds = {frozenset(names) for names in by_seed.values()}
    assert all(a <= b or b <= a for a, b in itertools.combinations(rounds, 2))  # dropped candidates never return
    assert len(rounds) == (3 if name == "halving" else 1)


def test_evaluated_episodes_equal_the_plan(method):
    name, settings = method
    for parents in (NAMES[:2], NAMES):
        evaluator = Quadratic((0.2, 0.8) if len(parents) == 2 else (0.2, 0.3, 0.5))
        found = search(name, evaluator, parents, **settings)
        assert sum(len(seeds) for _, seeds in evaluator.calls) == found.plan.episodes
        assert len({weights for weights, _ in evaluator.calls}) == found.plan.candidates


def test_halving_cost_is_the_sum_of_its_rungs():
    halving = HalvingSearch(HalvingConfig(episodes=40, rungs=3, factor=2))
    assert halving.schedule(2) == [(11, 10), (6, 20), (3, 40)]
    assert halving.plan(2).episodes == 11 * 10 + 6 * 10 + 3 * 20


def test_result_does_not_depend_on_the_order_of_policies(method):
    name, settings = method
    best = np.array([0.5, 0.1, 0.4])
    first = search(name, Quadratic(best), NAMES, **settings)
    for order in itertools.permutations(range(3)):
        again = search(name, Quadratic(best[list(order)]), [NAMES[i] for i in order], **settings)
        assert again.weights == tuple(first.weights[i] for i in order)


@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_killed_search_resumes_to_the_same_result(method, tmp_path, stop_after):
    name, settings = method
    whole = search(name, Quadratic((0.3, 0.7)), **settings)
    file = tmp_path / "search.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(name, Quadratic((0.3, 0.7), stop_after=stop_after), search_log=SearchLog(file, {"x": 1}), **settings)
    with file.open("a") as stream:
        stream.write('{"who": "weights 0.3 0.7", "fir')  # a partial last line
    search_log = SearchLog.open(file)
    assert search_log.request == {"x": 1}
    evaluator = Quadratic((0.3, 0.7))
    resumed = search(name, evaluator, search_log=search_log, **settings)
    assert search_summary(resumed) == search_summary(whole)
    played = sum(len(seeds) for _, seeds in evaluator.calls)
    assert played == whole.plan.episodes - json_episodes(file, stop_after)
    assert SearchLog.open(file).episodes == whole.plan.episodes


def json_episodes(file, count):
    """Episodes of the first `count` rows of a log."""
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return sum(row["episodes"] for row in rows[:count])


def test_damaged_logs_are_refused(tmp_path):
    file = tmp_path / "search.jsonl"
    search("grid", Quadratic((0.5, 0.5)), search_log=SearchLog(file), episodes=2)
    lines = file.read_text().splitlines()
    lines[3] = lines[3][:-20]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="is damaged"):
        SearchLog.open(file)
    file.write_text('{"version": 99, "request": {}}\n')
    with pytest.raises(UserError, match="has version 99"):
        SearchLog.open(file)


def test_composition_is_compared_with_every_policy_on_held_out_seeds():
    found = search("grid", Quadratic((0.3, 0.7), rate=True), episodes=20)
    policies: dict[str, Any] = {"a": make((1.0, 0.0)), "b": make((0.0, 1.0)), "both": make(found.weights)}
    seeds = range(500, 560)
    check_disjoint(found.seeds, seeds)
    results = evaluate_held_out(policies, Quadratic((0.3, 0.7), rate=True), seeds)
    assert all(result.seeds.tolist() == list(seeds) for result in results.values())
    compared = compare_with(results, "both")
    assert list(compared) == ["a", "b"]
    assert compared["a"].headline.difference.low > 0 and compared["a"].headline.losses == 0


@pytest.mark.parametrize(("first", "fits"), [(80, True), (81, False), (100, False), (119, False), (120, True)])
def test_overlapping_search_and_report_seeds_are_refused(first, fits):
    searched, reported = range(100, 120), range(first, first + 20)
    if fits:
        check_disjoint(searched, reported)
        return
    with pytest.raises(UserError, match="must not overlap"):
        check_disjoint(searched, reported)


def test_evaluators_without_reproducible_episodes_are_refused():
    with pytest.raises(UserError, match="cannot reproduce an episode"):
        search("grid", Quadratic((0.5, 0.5), seeded=False))


def test_evaluators_that_return_other_seeds_are_refused():
    class Wrong(Quadratic):
        def __call__(self, policy, seeds):
            return super().__call__(policy, [seed + 1 for seed in seeds])

    with pytest.raises(ValueError, match="returned seeds"):
        search("grid", Wrong((0.5, 0.5)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gird", {}, "Unknown search 'gird'. Did you mean 'grid'?"),
        ("grid", {"candidates": 3}, "Unknown setting 'candidates' in search 'grid'"),
        ("grid", {"episodes": 0}, "search 'grid'.episodes must be at least 1"),
        ("halving", {"episodes": 3}, "= 4 episodes or more"),
        ("bayes", {"candidates": 2}, "search 'bayes'.candidates must be at least 4"),
    ],
)
def test_invalid_search_settings_are_refused(name, settings, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace("*", r"\*")):
        make_search(name, **settings)


def test_gaussian_process_interpolates_certain_points_and_is_uncertain_far_away():
    played = {
        (k / 4, 1 - k / 4): Quadratic((0.5, 0.5), luck=1e-3)(make((k / 4, 1 - k / 4)), range(50)) for k in (0, 1, 2, 3)
    }
    mean, deviation = posterior(played, [*played, (0.625, 0.375), (1.0, 0.0)])
    exact = [1 - 2 * (k / 4 - 0.5) ** 2 for k in (0, 1, 2, 3)]
    assert mean[:4] == pytest.approx(exact, abs=5e-3)
    assert mean[4] == pytest.approx(1 - 2 * 0.125**2, abs=0.05)
    assert deviation[:4].max() < deviation[4] < deviation[5]


def test_gaussian_process_averages_uncertain_candidates():
    lucky = {(k / 10, 1 - k / 10): Quadratic((0.5, 0.5), luck=0)(make((0.5, 0.5)), range(4)) for k in range(11)}
    rates = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]  # a single success, in four episodes of one candidate
    for result, rate in zip(lucky.values(), rates, strict=True):
        object.__setattr__(result, "success", np.array([rate == 1, False, False, False]))
    mean, _ = posterior(lucky, list(lucky))
    assert mean.max() < 0.15  # far below the observed 0.25


def test_expected_improvement_is_large_for_large_mean_or_deviation():
    gain = expected_improvement(np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.1]), best=0.0)
    assert gain == pytest.approx([1.0, 1 / np.sqrt(2 * np.pi), 0.1 / np.sqrt(2 * np.pi)])


@pytest.mark.parametrize("parents", [NAMES[:2], NAMES])
def test_search_writes_a_table_and_a_curve(parents, tmp_path):
    best = (0.3, 0.7) if len(parents) == 2 else (0.2, 0.5, 0.3)
    found = search("halving", Quadratic(best, rate=True), parents, episodes=20)
    header, rows = search_table(found, parents)
    assert len(rows) == found.plan.candidates and sum(row[-1] == "chosen" for row in rows) == 1
    assert all(len(row) == len(header) for row in rows)
    text = write_table(found, parents, tmp_path / "search.csv").read_text().splitlines()
    assert len(text) == 1 + found.plan.candidates and text[0].startswith("weight b,weight a")
    with Image.open(weight_curve(found, parents, tmp_path / "curve.png")) as picture:
        assert min(picture.size) > 300 and len(picture.convert("L").getcolors() or ()) > 20
    json.dumps(search_summary(found), allow_nan=False)
