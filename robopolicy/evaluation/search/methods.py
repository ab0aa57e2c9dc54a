"""Search methods over weights: a grid, and successive halving over one, on common seeds.

A method is a plan, stated in episodes before anything is played, and a function that asks for outcomes of weights and
returns the weights it settles on. It sees outcomes alone, so that a simulator and a world model serve it alike, and
draws no random number, so that a search that remembers its outcomes can be repeated or resumed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.constraints import AtLeastTwo, PositiveInt, Range, Validated
from robopolicy.errors import UserError
from robopolicy.evaluation.result import EvalResult

Weights = tuple[float, ...]


def lattice(parents: int, divisions: int) -> list[Weights]:
    """All weights of `parents` policies that are multiples of `1 / divisions`, in lexicographic order.

    The corners, where one policy has all the weight, are among them: a search may find that composing does not help.
    """
    places = divisions + parents - 1
    found: list[Weights] = []
    for bars in combinations(range(places), parents - 1):  # the gaps between the bars add up to `divisions`
        ends = (-1, *bars, places)
        found.append(tuple((ends[i + 1] - ends[i] - 1) / divisions for i in range(parents)))
    return found


def corners_and_centre(parents: int) -> list[Weights]:
    """Each policy alone, and all of them in equal parts."""
    corners = [tuple(float(i == j) for j in range(parents)) for i in range(parents)]
    return [*corners, (1 / parents,) * parents]


def ranked(scores: Mapping[Weights, float]) -> list[Weights]:
    """Weights from best to worst. Among equal scores, those in the middle of their group come first, then equal parts.

    Success rates of few episodes tie often. The middle of a plateau is its safest place, whereas "the first one" would
    prefer one policy over the others for no reason.
    """
    groups: dict[float, list[Weights]] = {}
    for weights, score in scores.items():
        groups.setdefault(score, []).append(weights)
    order: list[Weights] = []
    for score in sorted(groups, reverse=True):
        points = np.array(groups[score])
        places = [_distances(points, points.mean(0)), _distances(points, 1 / points.shape[1])]
        order += [tuple(point) for *_, point in sorted(zip(*places, groups[score], strict=True))]
    return order


def _distances(points: NDArray[np.float64], centre: NDArray[np.float64] | float) -> list[float]:
    """Squared distances, rounded so that equal ones are equal whatever the order of the policies."""
    return ((points - centre) ** 2).sum(1).round(9).tolist()


EvaluateWeights = Callable[[Weights, range], EvalResult]
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

    def run(self, parents: int, ask: EvaluateWeights) -> Weights:
        """Search, and return the chosen weights."""
        ...


@dataclass(frozen=True)
class GridConfig(Validated):
    """Settings of a `GridSearch`."""

    episodes: PositiveInt = 50  # per candidate
    divisions: AtLeastTwo = 10  # candidates are all multiples of 1 / divisions


class GridSearch:
    """Every point of the lattice, all on the same episodes (Cao et al. 2025)."""

    name: ClassVar[str] = "grid"

    def __init__(self, config: GridConfig) -> None:
        self.config = config

    def plan(self, parents: int) -> Plan:
        """All candidates play all episodes."""
        count = lattice_size(parents, self.config.divisions)
        return Plan(count, count * self.config.episodes, self.config.episodes)

    def run(self, parents: int, ask: EvaluateWeights) -> Weights:
        """Play all and take the best."""
        episodes = range(self.config.episodes)
        return ranked(scores({w: [ask(w, episodes)] for w in lattice(parents, self.config.divisions)}))[0]


@dataclass(frozen=True)
class HalvingConfig(Validated):
    """Settings of a `HalvingSearch`."""

    episodes: PositiveInt = 50  # of a candidate that is never dropped
    divisions: AtLeastTwo = 10  # candidates are all multiples of 1 / divisions
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
    """Successive halving (Jamieson and Talwalkar 2015): drop the worse half early, play the rest for longer.

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

    def run(self, parents: int, ask: EvaluateWeights) -> Weights:
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


Array = NDArray[np.float64]


LENGTHS = np.geomspace(0.15, 2.0, 8)  # length scales of the process; the simplex has diameter 1.4


VARIANCES = (0.25, 1.0, 4.0)  # of the process, relative to that of the scores


@dataclass(frozen=True)
class BayesConfig(Validated):
    """Settings of a `BayesSearch`."""

    episodes: AtLeastTwo = 50  # per candidate
    candidates: Annotated[int, Range(4)] = 12  # weights; the first are each policy alone and all in equal parts
    divisions: AtLeastTwo = 20  # further candidates are multiples of 1 / divisions


class BayesSearch:
    """Expected improvement over the best posterior mean (Jones et al. 1998), one candidate at a time.

    The weights it returns have the highest posterior mean among those played: a lucky candidate between two poor ones
    does not win.
    """

    name: ClassVar[str] = "bayes"

    def __init__(self, config: BayesConfig) -> None:
        self.config = config

    def plan(self, parents: int) -> Plan:
        """As many candidates as configured, or as the lattice has.

        Raises:
            UserError: They do not suffice to begin with.
        """
        start = len(corners_and_centre(parents))
        if self.config.candidates <= start:
            raise UserError(
                f"A Bayesian search over {parents} policies begins with {start} candidates and needs more, "
                f"got {self.config.candidates}."
            )
        count = min(self.config.candidates, start + len(self._further(parents)))
        return Plan(count, count * self.config.episodes, self.config.episodes)

    def run(self, parents: int, ask: EvaluateWeights) -> Weights:
        """Play the start, then where improvement is expected; return the highest posterior mean."""
        episodes = range(self.config.episodes)
        played = {weights: ask(weights, episodes) for weights in corners_and_centre(parents)}
        further = self._further(parents)
        for _ in range(self.plan(parents).candidates - len(played)):
            open_points = [weights for weights in further if weights not in played]
            mean, deviation = posterior(played, [*played, *open_points])
            known = len(played)
            gain = expected_improvement(mean[known:], deviation[known:], float(mean[:known].max()))
            best = ranked(dict(zip(open_points, np.round(gain, 12).tolist(), strict=True)))[0]
            played[best] = ask(best, episodes)
        mean, _ = posterior(played, list(played))
        return ranked(dict(zip(played, np.round(mean, 12).tolist(), strict=True)))[0]

    def _further(self, parents: int) -> list[Weights]:
        start = corners_and_centre(parents)
        return [weights for weights in lattice(parents, self.config.divisions) if weights not in start]


def posterior(played: dict[Weights, EvalResult], points: list[Weights]) -> tuple[Array, Array]:
    """Mean and standard deviation `(P,)` of the expected outcome at `points`, given what was played."""
    x, new = np.array(list(played)), np.array(points)  # (n, M), (P, M)
    means = np.array([result.outcomes.mean() for result in played.values()])
    centre, scale = means.mean(), means.std() or 1.0
    y = (means - centre) / scale
    noise = np.array([_noise(result) for result in played.values()]) / scale**2 + 1e-6
    likelihoods, firsts, seconds = [], [], []  # of every process in the table
    for length in LENGTHS:
        among, towards = _matern(x, x, length), _matern(new, x, length)
        for variance in VARIANCES:
            root = np.linalg.cholesky(variance * among + np.diag(noise))
            white = np.linalg.solve(root, y)
            gain = np.linalg.solve(root, variance * towards.T)  # (n, P)
            mean = gain.T @ white
            likelihoods.append(-white @ white / 2 - np.log(np.diag(root)).sum())
            firsts.append(mean)
            seconds.append(variance - (gain**2).sum(0) + mean**2)
    share = np.exp(np.array(likelihoods) - max(likelihoods))
    share /= share.sum()
    mean = share @ np.array(firsts)
    deviation = np.sqrt(np.maximum(share @ np.array(seconds) - mean**2, 0.0))
    return centre + scale * mean, scale * deviation


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Expected amount `(P,)` by which points of that posterior exceed `best`."""
    deviation = np.maximum(deviation, 1e-12)
    z = (mean - best) / deviation
    below = torch.special.ndtr(torch.from_numpy(z)).numpy()
    return deviation * (z * below + np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


def _matern(a: Array, b: Array, length: float) -> Array:
    """Matern 5/2 correlation `(P, n)` of the points `a` `(P, M)` and `b` `(n, M)`."""
    r = np.sqrt(5 * ((a[:, None] - b[None]) ** 2).sum(-1)) / length
    return (1 + r + r * r / 3) * np.exp(-r)


def _noise(result: EvalResult) -> float:
    """Variance of the mean outcome; a rate of 0 or 1 is not taken for certain."""
    if result.success is not None:
        rate = (result.success.sum() + 1) / (result.n + 2)
        return float(rate * (1 - rate) / result.n)
    return float(result.returns.var(ddof=1) / result.n)
