"""Bayesian search: a Gaussian process over the simplex says which weights are worth the next episodes.

It pays from three policies on, where a grid has dozens of points and success changes smoothly between them. The noise
of every candidate is known from its episodes, so that few episodes are not overfitted; length scale and variance of
the process are averaged over a small table by their likelihood instead of being fitted to a handful of points. That
makes it a few lines of linear algebra without random numbers, which resumes exactly; libraries for the same task
(scikit-learn, Optuna, bayesian-optimization) would add far more than that, and none of them knows the simplex.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.evaluation.result import EvalResult
from robopolicy.evaluation.search.methods import Ask, Plan
from robopolicy.evaluation.search.simplex import Weights, corners_and_centre, lattice, ranked
from robopolicy.limits import Range, Ranged, Several

Array = NDArray[np.float64]

LENGTHS = np.geomspace(0.15, 2.0, 8)  # length scales of the process; the simplex has diameter 1.4
VARIANCES = (0.25, 1.0, 4.0)  # of the process, relative to that of the scores


@dataclass(frozen=True)
class BayesConfig(Ranged):
    """Settings of a `BayesSearch`."""

    episodes: Several = 50  # per candidate
    candidates: Annotated[int, Range(4)] = 12  # weights; the first are each policy alone and all in equal parts
    divisions: Several = 20  # further candidates are multiples of 1 / divisions


class BayesSearch:
    """Expected improvement over the best posterior mean (Jones, Schonlau and Welch, 1998), one candidate at a time.

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

    def run(self, parents: int, ask: Ask) -> Weights:
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
