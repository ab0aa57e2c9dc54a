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

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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
from robopolicy.files import parse_json, write_text
from robopolicy.policies.base import Policy
from robopolicy.schema import from_dict, to_dict
from robopolicy.sim.contract import VectorSim

SEARCH_LOG_VERSION = 1


Key = tuple[str, int, int]  # who played, first episode seed, episodes


class SearchLog:
    """Finished evaluations by who played which episodes; in memory alone where it has no file."""

    def __init__(self, path: Path | None = None, request: Mapping[str, Any] | None = None) -> None:
        """An empty ledger, written to `path` at once; `request` is kept with it, plain JSON values."""
        self.path = path
        self.request = dict(request or {})
        self._known: dict[Key, EvalResult] = {}
        if path is not None:
            write_text(path, json.dumps({"version": SEARCH_LOG_VERSION, "request": self.request}) + "\n")

    @classmethod
    def open(cls, path: Path) -> SearchLog:
        """Read a ledger to go on with it. A last line that was cut off while it was written is dropped.

        Raises:
            UserError: It is damaged elsewhere, or was written by another version.
        """
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        try:
            head, *rows = [parse_json(line) for line in whole.decode("utf-8").splitlines()] or [{}]
            if head.get("version") != SEARCH_LOG_VERSION:
                raise UserError(
                    f"{path} has version {head.get('version')!r}, this robopolicy reads {SEARCH_LOG_VERSION}; "
                    f"search anew."
                )
            ledger = cls(request=head["request"])
            ledger._known = {
                (row["who"], row["first"], row["episodes"]): EvalResult.from_dict(row["result"]) for row in rows
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); search anew.") from error
        ledger.path = path
        write_text(path, whole.decode("utf-8") + "\n")
        return ledger

    @property
    def episodes(self) -> int:
        """Episodes on record, of everybody together."""
        return sum(episodes for _, _, episodes in self._known)

    def get_or_run(self, who: str, seeds: Sequence[int], run: Callable[[], EvalResult]) -> EvalResult:
        """The result of `who` on the consecutive episodes `seeds`: from the record, or played and recorded now.

        Raises:
            UserError: The evaluator cannot repeat episodes, so that candidates cannot share them.
            ValueError: It returned other episodes than it was asked for.
        """
        key = (who, seeds[0], len(seeds))
        if key not in self._known:
            result = run()
            if not result.seeded:
                raise UserError(
                    f"The backend of {result.task} cannot repeat an episode from its seed, so candidates would not "
                    "share theirs; choose another --backend."
                )
            if result.seeds.tolist() != list(seeds):
                raise ValueError(f"The evaluator played seeds {result.seeds}, asked for {seeds}.")
            self._append(key, result)
            self._known[key] = result
        return self._known[key]

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
    """Plays episodes. The same policy and seeds must give the same outcomes, or candidates do not share them."""

    def __call__(self, policy: Policy, seeds: Sequence[int]) -> EvalResult:
        """Outcomes of the consecutive episode `seeds`, in that order: success, or returns where there is none."""
        ...


class SimEvaluator:
    """Plays in a simulator, as `robopolicy eval` does."""

    def __init__(
        self,
        sim: VectorSim,
        *,
        deterministic: bool = True,
        probe: bool = False,
        measure: str = "success",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Play in `sim`.

        Args:
            sim: Simulator of the task, with any number of environments.
            deterministic: Switch exploration noise off.
            probe: Measure the latency of single decisions, too.
            measure: What to tell of the episodes: success where the task defines it, or `return` alone.
            progress: Called after every decision with the number of finished episodes.
        """
        self.sim = sim
        self.deterministic = deterministic
        self.probe = probe
        self.measure = measure
        self.progress = progress

    def __call__(self, policy: Policy, seeds: Sequence[int]) -> EvalResult:
        """Play the episodes."""
        played = run_episodes(
            policy, self.sim, seeds, deterministic=self.deterministic, probe=self.probe, progress=self.progress
        )
        return played if self.measure == "success" else replace(played, success=None)


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
    plan, record = method.plan(len(parents)), log or SearchLog()
    order = sorted(range(len(parents)), key=lambda i: parents[i])
    played: dict[Weights, list[EvalResult]] = {}

    def given(canonical: Weights) -> Weights:
        placed = dict(zip(order, canonical, strict=True))
        return tuple(placed[i] for i in range(len(parents)))

    def ask(canonical: Weights, episodes: range) -> EvalResult:
        weights, seeds = given(canonical), range(seed + episodes.start, seed + episodes.stop)
        who = "weights " + " ".join(f"{weight:.6g}" for weight in weights)
        result = record.get_or_run(who, seeds, lambda: evaluator(make(weights), seeds))
        played.setdefault(weights, []).append(result)
        return result

    chosen = given(method.run(len(parents), ask))
    candidates = tuple(Candidate(weights, concat_results(played[weights])) for weights in sorted(played))
    return WeightSearch(method.name, plan, range(seed, seed + plan.seeds), chosen, candidates)


def evaluate_held_out(
    policies: Mapping[str, Policy],
    evaluator: Evaluator,
    seeds: range,
    *,
    log: SearchLog | None = None,
    where: str = "",
) -> dict[str, EvalResult]:
    """Play `seeds`, which no search has seen, with every policy: results by name, in the same order.

    The ledger tells evaluators of one trial apart by `where`.
    """
    record = log or SearchLog()
    return {
        name: record.get_or_run(f"policy {name}{where}", seeds, lambda policy=policy: evaluator(policy, seeds))
        for name, policy in policies.items()
    }


def compare_with(results: Mapping[str, EvalResult], composed: str) -> dict[str, Comparison]:
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
