"""The search for weights, and the trial on episodes that it has not seen.

    method = make_search("halving", episodes=60)
    print(method.plan(len(parents)))                      # the cost, before anything is played
    found = search_weights(method, list(parents), composed.with_weights, SimEvaluator(sim), seed=20_000)
    best = composed.with_weights(found.weights)
    trial = hold_out({**parents, "composed": best}, SimEvaluator(sim), range(30_000, 30_200))

The best of many noisy scores is too good to be true. Only the trial, on other episodes and with the weights fixed,
says what composing gained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.compare import Comparison, compare
from robopolicy.evaluation.intervals import Interval
from robopolicy.evaluation.result import EvalResult, joined
from robopolicy.evaluation.search.bayes import BayesConfig, BayesSearch
from robopolicy.evaluation.search.evaluators import Evaluator
from robopolicy.evaluation.search.ledger import Ledger
from robopolicy.evaluation.search.methods import (
    GridConfig,
    GridSearch,
    HalvingConfig,
    HalvingSearch,
    Plan,
    SearchMethod,
)
from robopolicy.evaluation.search.simplex import Weights
from robopolicy.policies.base import Policy
from robopolicy.schema import from_plain, to_plain

SEARCHES: dict[str, tuple[type[Any], Callable[[Any], SearchMethod]]] = {
    "bayes": (BayesConfig, BayesSearch),
    "grid": (GridConfig, GridSearch),
    "halving": (HalvingConfig, HalvingSearch),
}
"""Name -> (config class, method class)."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Weights that were tried, with all episodes they played."""

    weights: Weights
    result: EvalResult


@dataclass(frozen=True, eq=False)
class WeightSearch:
    """What a search found."""

    method: str
    plan: Plan
    seeds: range  # episode seeds that were played
    weights: Weights  # the choice
    candidates: tuple[Candidate, ...]  # in lexicographic order of their weights

    @property
    def chosen(self) -> Candidate:
        """The candidate with the chosen weights."""
        return next(candidate for candidate in self.candidates if candidate.weights == self.weights)


def make_search(name: str, **settings: Any) -> SearchMethod:
    """The search method `name` with those settings; others keep their defaults.

    Raises:
        UserError: The method or a setting is unknown, or a value makes no sense.
    """
    if name not in SEARCHES:
        raise unknown_name("search", name, SEARCHES)
    config_class, method_class = SEARCHES[name]
    return method_class(from_plain(config_class, to_plain(config_class()) | settings, f"search '{name}'"))


def search_weights(
    method: SearchMethod,
    parents: Sequence[str],
    make: Callable[[Weights], Policy],
    evaluator: Evaluator,
    *,
    seed: int,
    ledger: Ledger | None = None,
) -> WeightSearch:
    """Search weights for a composition.

    Args:
        method: How.
        parents: One name per composed policy, best its content hash. The search runs in the order of the names, so that
            the order in which the policies are given changes nothing.
        make: The composed policy for given weights, in the order of `parents`.
        evaluator: What plays the episodes.
        seed: First episode seed. All candidates play `seed`, `seed + 1`, ...
        ledger: Remembers outcomes, and supplies those of an interrupted search.

    Raises:
        UserError: The plan cannot be carried out (see the method), or episodes cannot be repeated.
    """
    plan, record = method.plan(len(parents)), ledger or Ledger()
    order = sorted(range(len(parents)), key=lambda i: parents[i])
    played: dict[Weights, list[EvalResult]] = {}

    def given(canonical: Weights) -> Weights:
        placed = dict(zip(order, canonical, strict=True))
        return tuple(placed[i] for i in range(len(parents)))

    def ask(canonical: Weights, episodes: range) -> EvalResult:
        weights, seeds = given(canonical), range(seed + episodes.start, seed + episodes.stop)
        who = "weights " + " ".join(f"{weight:.6g}" for weight in weights)
        result = record.recall(who, seeds, lambda: evaluator(make(weights), seeds))
        played.setdefault(weights, []).append(result)
        return result

    chosen = given(method.run(len(parents), ask))
    candidates = tuple(Candidate(weights, joined(played[weights])) for weights in sorted(played))
    return WeightSearch(method.name, plan, range(seed, seed + plan.seeds), chosen, candidates)


def hold_out(
    policies: Mapping[str, Policy], evaluator: Evaluator, seeds: range, *, ledger: Ledger | None = None, where: str = ""
) -> dict[str, EvalResult]:
    """Play `seeds`, which no search has seen, with every policy: results by name, in the same order.

    The ledger tells evaluators of one trial apart by `where`.
    """
    record = ledger or Ledger()
    return {
        name: record.recall(f"policy {name}{where}", seeds, lambda policy=policy: evaluator(policy, seeds))
        for name, policy in policies.items()
    }


def against(results: Mapping[str, EvalResult], composed: str) -> dict[str, Comparison]:
    """The composed policy compared with every other one on common seeds, by their names."""
    return {name: compare(result, results[composed]) for name, result in results.items() if name != composed}


def check_disjoint(searched: range, reported: range) -> None:
    """Refuse episodes that both choose the weights and report on them.

    Raises:
        UserError: Some seed is in both.
    """
    if searched and reported and searched.start < reported.stop and reported.start < searched.stop:
        raise UserError(
            f"The search plays seeds {searched.start} to {searched.stop - 1} and the report {reported.start} to "
            f"{reported.stop - 1}; they must not overlap, or the report flatters the chosen weights."
        )


def score(result: EvalResult) -> Interval:
    """The interval of what a search maximises: success where the task defines it, else return."""
    return result.success_interval() or result.return_interval()
