"""How a search spends its episodes: a grid, or successive halving over one. Both play common seeds.

A method is a plan, stated in episodes before anything is played, and a function that asks for outcomes of weights and
returns the weights it settles on. It sees outcomes alone, so that a simulator and a world model serve it alike, and
draws no random number, so that a search that remembers its outcomes can be repeated or resumed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

from robopolicy.errors import UserError
from robopolicy.evaluation.result import EvalResult
from robopolicy.evaluation.search.simplex import Weights, lattice, ranked
from robopolicy.limits import Count, Range, Ranged, Several

Ask = Callable[[Weights, range], EvalResult]
"""Plays the search episodes `range(first, end)`, numbered from 0, under weights and returns their outcomes."""


@dataclass(frozen=True)
class Plan:
    """What a search will cost."""

    candidates: int  # weights that will be tried
    episodes: int  # episodes that will be played, of all candidates together
    seeds: int  # different episode seeds among them

    def __str__(self) -> str:
        return f"{self.candidates} candidates, {self.episodes} episodes on {self.seeds} common seeds"


class SearchMethod(Protocol):
    """A way of searching; see the module docstring."""

    name: ClassVar[str]

    def plan(self, parents: int) -> Plan:
        """The cost for that number of policies."""
        ...

    def run(self, parents: int, ask: Ask) -> Weights:
        """Search, and return the chosen weights."""
        ...


@dataclass(frozen=True)
class GridConfig(Ranged):
    """Settings of a `GridSearch`."""

    episodes: Count = 50  # per candidate
    divisions: Several = 10  # candidates are all multiples of 1 / divisions


class GridSearch:
    """Every point of the lattice, all on the same episodes (S010)."""

    name: ClassVar[str] = "grid"

    def __init__(self, config: GridConfig) -> None:
        self.config = config

    def plan(self, parents: int) -> Plan:
        """All candidates play all episodes."""
        count = lattice_size(parents, self.config.divisions)
        return Plan(count, count * self.config.episodes, self.config.episodes)

    def run(self, parents: int, ask: Ask) -> Weights:
        """Play all and take the best."""
        episodes = range(self.config.episodes)
        return ranked(scores({w: [ask(w, episodes)] for w in lattice(parents, self.config.divisions)}))[0]


@dataclass(frozen=True)
class HalvingConfig(Ranged):
    """Settings of a `HalvingSearch`."""

    episodes: Count = 50  # of a candidate that is never dropped
    divisions: Several = 10  # candidates are all multiples of 1 / divisions
    rungs: Annotated[int, Range(1, 20)] = 3  # rounds of playing and dropping
    factor: Annotated[int, Range(2, 1000)] = (
        2  # a rung keeps 1 / factor of the candidates and raises their episodes `factor` times
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.factor ** (self.rungs - 1)
        if self.episodes < least:
            raise UserError(f"Halving needs factor ** (rungs - 1) = {least} episodes or more, got {self.episodes}.")


class HalvingSearch:
    """Successive halving (Jamieson and Talwalkar, 2016): drop the worse half early, play the rest for longer.

    Candidates of one rung have always played the same episodes; what they have played counts in the next rung. A good
    candidate can be dropped early by bad luck, so the first rung should not be too short.
    """

    name: ClassVar[str] = "halving"

    def __init__(self, config: HalvingConfig) -> None:
        self.config = config

    def schedule(self, parents: int) -> list[tuple[int, int]]:
        """Per rung the number of candidates and the episodes that each of them has then played in all."""
        size, last = lattice_size(parents, self.config.divisions), self.config.rungs - 1
        powers = [self.config.factor**rung for rung in range(last + 1)]
        return [(math.ceil(size / powers[i]), self.config.episodes // powers[last - i]) for i in range(last + 1)]

    def plan(self, parents: int) -> Plan:
        """Each rung plays only what its candidates have not played yet."""
        schedule = self.schedule(parents)
        before = [0, *(played for _, played in schedule)]
        total = sum(count * (played - before[i]) for i, (count, played) in enumerate(schedule))
        return Plan(schedule[0][0], total, schedule[-1][1])

    def run(self, parents: int, ask: Ask) -> Weights:
        """Climb the rungs and take the best of the last."""
        order, before = lattice(parents, self.config.divisions), 0
        results: dict[Weights, list[EvalResult]] = {weights: [] for weights in order}
        for count, played in self.schedule(parents):
            kept = order[:count]
            for weights in kept:
                results[weights].append(ask(weights, range(before, played)))
            order, before = ranked(scores({weights: results[weights] for weights in kept})), played
        return order[0]


def scores(results: dict[Weights, list[EvalResult]]) -> dict[Weights, float]:
    """Mean outcome of each candidate over all its episodes."""
    return {weights: _mean(parts) for weights, parts in results.items()}


def _mean(parts: Iterable[EvalResult]) -> float:
    values = [value for part in parts for value in part.outcomes.tolist()]
    return math.fsum(values) / len(values)  # exact, so that equal candidates tie


def lattice_size(parents: int, divisions: int) -> int:
    """Number of points of `lattice`, without making them."""
    return math.comb(divisions + parents - 1, parents - 1)
