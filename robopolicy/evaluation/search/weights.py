"""Search for the weights of a composition, and evaluation on held-out episodes.

    method = make_search("halving", episodes=60)
    print(method.plan(len(parents)))  # the cost
    found = search_weights(method, list(parents), composed.with_weights, SimEvaluator(sim), seed=20_000)
    best = composed.with_weights(found.weights)
    results = evaluate_held_out({**parents, "composed": best}, SimEvaluator(sim), range(30_000, 30_200))

The best of many noisy scores is biased upwards. Only the held-out evaluation, on other episodes and with fixed weights,
measures the gain of the composition.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from robopolicy.atomic import write_text
from robopolicy.errors import UserError, cannot_write, unknown_name
from robopolicy.evaluation.harness import run_episodes
from robopolicy.evaluation.intervals import Interval
from robopolicy.evaluation.result import Comparison, EvalResult, compare, concat_results
from robopolicy.evaluation.search.methods import (
    BayesConfig,
    BayesSearch,
    GridConfig,
    GridSearch,
    HalvingConfig,
    HalvingSearch,
    Plan,
    SearchMethod,
    Weights,
)
from robopolicy.files import parse_json
from robopolicy.policies.base import Policy
from robopolicy.schema import from_dict, to_dict
from robopolicy.sim.contract import VectorSim

SEARCH_LOG_VERSION = 1
Key = tuple[str, int, int]  # name of the policy, first episode seed, number of episodes


class SearchLog:
    """Log of finished evaluations by policy and episodes; only in memory without a file."""

    def __init__(self, path: Path | None = None, request: Mapping[str, Any] | None = None) -> None:
        """Create an empty log, written to `path`, with the JSON values `request`."""
        self.path = path
        self.request = dict(request or {})
        self._results: dict[Key, EvalResult] = {}
        if path is not None:
            write_text(path, json.dumps({"version": SEARCH_LOG_VERSION, "request": self.request}) + "\n")

    @classmethod
    def open(cls, path: Path) -> SearchLog:
        """Read a log to resume it; an incomplete last line is dropped, other damage is a UserError."""
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        try:
            head, *rows = [parse_json(line) for line in whole.decode("utf-8").splitlines()] or [{}]
            if head.get("version") != SEARCH_LOG_VERSION:
                raise UserError(
                    f"{path} has version {head.get('version')!r}, expected {SEARCH_LOG_VERSION}; start a new search."
                )
            log = cls(request=head["request"])
            log._results = {
                (row["who"], row["first"], row["episodes"]): EvalResult.from_dict(row["result"]) for row in rows
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); start a new search.") from error
        log.path = path
        write_text(path, whole.decode("utf-8") + "\n")
        return log

    @property
    def episodes(self) -> int:
        """Number of logged episodes."""
        return sum(episodes for _, _, episodes in self._results)

    def get_or_run(self, who: str, seeds: Sequence[int], run: Callable[[], EvalResult]) -> EvalResult:
        """Return the result of policy `who` on the consecutive episodes `seeds` from the log, or run and log it.

        Raises:
            UserError: The evaluator cannot reproduce episodes, so candidates cannot share them.
            ValueError: It returned other episodes.
        """
        key = (who, seeds[0], len(seeds))
        if key not in self._results:
            result = run()
            if not result.seeded:
                raise UserError(
                    f"The backend of {result.task} cannot reproduce an episode from its seed, so candidates cannot "
                    "share episodes; choose another --backend."
                )
            if result.seeds.tolist() != list(seeds):
                raise ValueError(f"The evaluator returned seeds {result.seeds}, expected {seeds}.")
            self._append(key, result)
            self._results[key] = result
        return self._results[key]

    def _append(self, key: Key, result: EvalResult) -> None:
        if self.path is None:
            return
        who, first, episodes = key
        row = {"who": who, "first": first, "episodes": episodes, "result": result.to_dict()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error


class Evaluator(Protocol):
    """Evaluator of policies, reproducible for the same policy and seeds, so that candidates are comparable."""

    def __call__(self, policy: Policy, seeds: Sequence[int]) -> EvalResult:
        """Return the result of the consecutive episodes `seeds`, in that order."""
        ...


class SimEvaluator:
    """Evaluator in a simulator, as in `robopolicy eval`."""

    def __init__(
        self,
        sim: VectorSim,
        *,
        deterministic: bool = True,
        probe: bool = False,
        measure: str = "success",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Wrap `sim`; `probe` measures decision latencies, and `measure="return"` ignores the success of a task."""
        self.sim = sim
        self.deterministic = deterministic
        self.probe = probe
        self.measure = measure
        self.progress = progress

    def __call__(self, policy: Policy, seeds: Sequence[int]) -> EvalResult:
        """Evaluate the episodes."""
        options: dict[str, Any] = {"deterministic": self.deterministic, "probe": self.probe, "progress": self.progress}
        result = run_episodes(policy, self.sim, seeds, **options)
        return result if self.measure == "success" else replace(result, success=None)


SEARCHES: dict[str, tuple[type[Any], Callable[[Any], SearchMethod]]] = {
    "bayes": (BayesConfig, BayesSearch),
    "grid": (GridConfig, GridSearch),
    "halving": (HalvingConfig, HalvingSearch),
}
"""Name -> (config class, method class)."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Evaluated weights with the result of all their episodes."""

    weights: Weights
    result: EvalResult


@dataclass(frozen=True, eq=False)
class WeightSearch:
    """Result of a search."""

    method: str
    plan: Plan
    seeds: range  # episode seeds of the search
    weights: Weights  # the chosen weights
    candidates: tuple[Candidate, ...]  # in lexicographic order of their weights

    @property
    def chosen(self) -> Candidate:
        """The candidate with the chosen weights."""
        return next(candidate for candidate in self.candidates if candidate.weights == self.weights)


def make_search(name: str, **settings: Any) -> SearchMethod:
    """Create the search method `name`; a UserError is raised for unknown names and invalid settings."""
    if name not in SEARCHES:
        raise unknown_name("search", name, SEARCHES)
    config_class, method_class = SEARCHES[name]
    return method_class(from_dict(config_class, to_dict(config_class()) | settings, f"search '{name}'"))


def search_weights(
    method: SearchMethod,
    parents: Sequence[str],
    make: Callable[[Weights], Policy],
    evaluator: Evaluator,
    *,
    seed: int,
    log: SearchLog | None = None,
) -> WeightSearch:
    """Search weights for a composition.

    Args:
        method: Search method.
        parents: Name of every composed policy, ideally its content hash. The search runs in the order of the names, so
            that the order of the policies does not change the result.
        make: Function from weights, in the order of `parents`, to the composed policy.
        evaluator: Evaluator of the candidates.
        seed: First episode seed. All candidates use `seed`, `seed + 1`, ...
        log: Log of the results, which may contain results of an interrupted search.

    Raises:
        UserError: The plan is not possible (see the method), or episodes cannot be reproduced.
    """
    plan, record = method.plan(len(parents)), log or SearchLog()
    order = sorted(range(len(parents)), key=lambda i: parents[i])
    results: dict[Weights, list[EvalResult]] = {}

    def original_order(canonical: Weights) -> Weights:
        by_parent = dict(zip(order, canonical, strict=True))
        return tuple(by_parent[i] for i in range(len(parents)))

    def evaluate(canonical: Weights, episodes: range) -> EvalResult:
        weights, seeds = original_order(canonical), range(seed + episodes.start, seed + episodes.stop)
        who = "weights " + " ".join(f"{weight:.6g}" for weight in weights)
        result = record.get_or_run(who, seeds, lambda: evaluator(make(weights), seeds))
        results.setdefault(weights, []).append(result)
        return result

    chosen = original_order(method.run(len(parents), evaluate))
    candidates = tuple(Candidate(weights, concat_results(results[weights])) for weights in sorted(results))
    return WeightSearch(method.name, plan, range(seed, seed + plan.seeds), chosen, candidates)


def evaluate_held_out(
    policies: Mapping[str, Policy], evaluator: Evaluator, seeds: range, *, log: SearchLog | None = None, where: str = ""
) -> dict[str, EvalResult]:
    """Evaluate every policy on `seeds`, which no search has used; returns the results by name, in the same order.

    `where` distinguishes the evaluators of one log.
    """
    record = log or SearchLog()
    return {
        name: record.get_or_run(f"policy {name}{where}", seeds, lambda policy=policy: evaluator(policy, seeds))
        for name, policy in policies.items()
    }


def compare_with(results: Mapping[str, EvalResult], composed: str) -> dict[str, Comparison]:
    """Compare the composed policy with every other one on common seeds; returns the comparisons by name."""
    return {name: compare(result, results[composed]) for name, result in results.items() if name != composed}


def check_disjoint(searched: range, reported: range) -> None:
    """Raise a UserError if the search and the report share seeds."""
    if searched and reported and searched.start < reported.stop and reported.start < searched.stop:
        raise UserError(
            f"The search uses seeds {searched.start} to {searched.stop - 1} and the report {reported.start} to "
            f"{reported.stop - 1}; they must not overlap, because the report would favour the chosen weights."
        )


def score(result: EvalResult) -> Interval:
    """Return the interval of the objective: success where the task defines it, else return."""
    return result.success_interval() or result.return_interval()
