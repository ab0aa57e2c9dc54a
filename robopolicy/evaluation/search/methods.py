"""Search methods over weights: grid search, successive halving and Bayesian optimisation, on common seeds.

A method states its plan in episodes in advance, requests the outcomes of weights from a function, and returns the
chosen weights. The function may use a simulator or a world model. Methods draw no random numbers, so that a search with
logged outcomes can be repeated and resumed exactly.
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
from robopolicy.plurals import counted

Weights = tuple[float, ...]


def lattice(parents: int, divisions: int) -> list[Weights]:
    """Return all weights of `parents` policies that are multiples of `1 / divisions`, in lexicographic order.

    They include the corners, where one policy has all the weight.
    """
    places = divisions + parents - 1
    found: list[Weights] = []
    for bars in combinations(range(places), parents - 1):  # the gaps between the bars sum to `divisions`
        ends = (-1, *bars, places)
        found.append(tuple((ends[i + 1] - ends[i] - 1) / divisions for i in range(parents)))
    return found


def corners_and_centre(parents: int) -> list[Weights]:
    """Return the weights of each single policy, and equal weights."""
    corners = [tuple(float(i == j) for j in range(parents)) for i in range(parents)]
    return [*corners, (1 / parents,) * parents]


def ranked(scores: Mapping[Weights, float]) -> list[Weights]:
    """Sort weights from best to worst; ties by distance to the mean of their group, then to equal weights.

    Success rates of few episodes are often equal, and the middle of a plateau is more robust than its first point.
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
    """Return squared distances, rounded so that they do not depend on the order of the policies."""
    return ((points - centre) ** 2).sum(1).round(9).tolist()


EvaluateWeights = Callable[[Weights, range], EvalResult]
"""Function that evaluates weights on the search episodes `range(first, end)`, numbered from 0."""


@dataclass(frozen=True)
class Plan:
    """Cost of a search."""

    candidates: int  # weights to evaluate
    episodes: int  # episodes of all candidates
    seeds: int  # distinct episode seeds

    def __str__(self) -> str:
        episodes = f"{counted(self.episodes, 'episode')} on {counted(self.seeds, 'common seed')}"
        return f"{counted(self.candidates, 'candidate')}, {episodes}"


class SearchMethod(Protocol):
    """Search method over weights."""

    name: ClassVar[str]

    def plan(self, parents: int) -> Plan:
        """Return the cost for a number of policies."""
        ...

    def run(self, parents: int, evaluate: EvaluateWeights) -> Weights:
        """Search, and return the chosen weights."""
        ...


@dataclass(frozen=True)
class GridConfig(Validated):
    """Settings of a `GridSearch`."""

    episodes: PositiveInt = 50  # per candidate
    divisions: AtLeastTwo = 10  # candidates are all multiples of 1 / divisions


class GridSearch:
    """Evaluation of every point of the lattice on the same episodes (Cao et al. 2025)."""

    name: ClassVar[str] = "grid"

    def __init__(self, config: GridConfig) -> None:
        self.config = config

    def plan(self, parents: int) -> Plan:
        """Evaluate all candidates on all episodes."""
        count = lattice_size(parents, self.config.divisions)
        return Plan(count, count * self.config.episodes, self.config.episodes)

    def run(self, parents: int, evaluate: EvaluateWeights) -> Weights:
        """Evaluate all candidates and return the best."""
        episodes = range(self.config.episodes)
        return ranked(scores({w: [evaluate(w, episodes)] for w in lattice(parents, self.config.divisions)}))[0]


@dataclass(frozen=True)
class HalvingConfig(Validated):
    """Settings of a `HalvingSearch`."""

    episodes: PositiveInt = 50  # of a candidate of the last rung
    divisions: AtLeastTwo = 10  # candidates are all multiples of 1 / divisions
    rungs: Annotated[int, Range(1, 20)] = 3  # rounds of evaluation and elimination
    factor: Annotated[int, Range(2, 1000)] = 2  # a rung keeps 1 / factor of the candidates with factor x episodes

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.factor ** (self.rungs - 1)
        if self.episodes < least:
            raise UserError(f"Halving needs factor ** (rungs - 1) = {least} episodes or more, got {self.episodes}.")


class HalvingSearch:
    """Successive halving (Jamieson and Talwalkar 2015): eliminate candidates early, evaluate the rest for longer.

    Candidates of a rung share their episodes, which also count in the next rung. A short first rung may eliminate
    a good candidate by chance.
    """

    name: ClassVar[str] = "halving"

    def __init__(self, config: HalvingConfig) -> None:
        self.config = config

    def schedule(self, parents: int) -> list[tuple[int, int]]:
        """Return the number of candidates and the cumulative episodes per candidate of every rung."""
        size, last = lattice_size(parents, self.config.divisions), self.config.rungs - 1
        powers = [self.config.factor**rung for rung in range(last + 1)]
        return [(math.ceil(size / powers[i]), self.config.episodes // powers[last - i]) for i in range(last + 1)]

    def plan(self, parents: int) -> Plan:
        """Count the new episodes of each rung."""
        schedule = self.schedule(parents)
        before = [0, *(episodes for _, episodes in schedule)]
        total = sum(count * (episodes - before[i]) for i, (count, episodes) in enumerate(schedule))
        return Plan(schedule[0][0], total, schedule[-1][1])

    def run(self, parents: int, evaluate: EvaluateWeights) -> Weights:
        """Run the rungs and return the best candidate of the last one."""
        order, before = lattice(parents, self.config.divisions), 0
        results: dict[Weights, list[EvalResult]] = {weights: [] for weights in order}
        for count, episodes in self.schedule(parents):
            kept = order[:count]
            for weights in kept:
                results[weights].append(evaluate(weights, range(before, episodes)))
            order, before = ranked(scores({weights: results[weights] for weights in kept})), episodes
        return order[0]


def scores(results: dict[Weights, list[EvalResult]]) -> dict[Weights, float]:
    """Return the mean outcome of each candidate over all its episodes."""
    return {weights: _mean(parts) for weights, parts in results.items()}


def _mean(parts: Iterable[EvalResult]) -> float:
    values = [value for part in parts for value in part.outcomes.tolist()]
    return math.fsum(values) / len(values)  # exact, so that equal candidates have equal scores


def lattice_size(parents: int, divisions: int) -> int:
    """Return the number of points of `lattice`."""
    return math.comb(divisions + parents - 1, parents - 1)


Array = NDArray[np.float64]
LENGTHS = np.geomspace(0.15, 2.0, 8)  # length scales of the Gaussian process; the simplex has diameter 1.4
VARIANCES = (0.25, 1.0, 4.0)  # variances of the process, relative to the scores


@dataclass(frozen=True)
class BayesConfig(Validated):
    """Settings of a `BayesSearch`."""

    episodes: AtLeastTwo = 50  # per candidate
    candidates: Annotated[int, Range(4)] = 12  # number of weights, including the corners and equal weights
    divisions: AtLeastTwo = 20  # further candidates are multiples of 1 / divisions


class BayesSearch:
    """Bayesian optimisation by expected improvement over the best posterior mean (Jones et al. 1998).

    It returns the evaluated weights with the highest posterior mean, which discounts a lucky candidate between two poor
    ones.
    """

    name: ClassVar[str] = "bayes"

    def __init__(self, config: BayesConfig) -> None:
        self.config = config

    def plan(self, parents: int) -> Plan:
        """Plan the configured candidates, at most the lattice; a UserError is raised for too few."""
        start = len(corners_and_centre(parents))
        if self.config.candidates <= start:
            raise UserError(
                f"A Bayesian search over {parents} policies starts with {start} candidates and needs more, "
                f"got {self.config.candidates}."
            )
        count = min(self.config.candidates, start + len(self._further(parents)))
        return Plan(count, count * self.config.episodes, self.config.episodes)

    def run(self, parents: int, evaluate: EvaluateWeights) -> Weights:
        """Evaluate the initial candidates, then maximise the expected improvement; return the best posterior mean."""
        episodes = range(self.config.episodes)
        results = {weights: evaluate(weights, episodes) for weights in corners_and_centre(parents)}
        further = self._further(parents)
        for _ in range(self.plan(parents).candidates - len(results)):
            open_points = [weights for weights in further if weights not in results]
            mean, deviation = posterior(results, [*results, *open_points])
            known = len(results)
            gain = expected_improvement(mean[known:], deviation[known:], float(mean[:known].max()))
            best = ranked(dict(zip(open_points, np.round(gain, 12).tolist(), strict=True)))[0]
            results[best] = evaluate(best, episodes)
        mean, _ = posterior(results, list(results))
        return ranked(dict(zip(results, np.round(mean, 12).tolist(), strict=True)))[0]

    def _further(self, parents: int) -> list[Weights]:
        start = corners_and_centre(parents)
        return [weights for weights in lattice(parents, self.config.divisions) if weights not in start]


def posterior(results: dict[Weights, EvalResult], points: list[Weights]) -> tuple[Array, Array]:
    """Return mean and standard deviation `(P,)` of the expected outcome at `points`, averaged over hyperparameters."""
    x, new = np.array(list(results)), np.array(points)  # (n, M), (P, M)
    means = np.array([result.outcomes.mean() for result in results.values()])
    centre, scale = means.mean(), means.std() or 1.0
    y = (means - centre) / scale
    noise = np.array([_noise(result) for result in results.values()]) / scale**2 + 1e-6
    likelihoods, firsts, seconds = [], [], []  # per pair of hyperparameters
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
    """Return the expected improvement `(P,)` over `best` of points with a normal posterior."""
    deviation = np.maximum(deviation, 1e-12)
    z = (mean - best) / deviation
    below = torch.special.ndtr(torch.from_numpy(z)).numpy()
    return deviation * (z * below + np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


def _matern(a: Array, b: Array, length: float) -> Array:
    """Return the Matern 5/2 correlation `(P, n)` of the points `a` `(P, M)` and `b` `(n, M)`."""
    r = np.sqrt(5 * ((a[:, None] - b[None]) ** 2).sum(-1)) / length
    return (1 + r + r * r / 3) * np.exp(-r)


def _noise(result: EvalResult) -> float:
    """Return the variance of the mean outcome, smoothed so that rates of 0 and 1 have a variance."""
    if result.success is not None:
        rate = (result.success.sum() + 1) / (result.n + 2)
        return float(rate * (1 - rate) / result.n)
    return float(result.returns.var(ddof=1) / result.n)
