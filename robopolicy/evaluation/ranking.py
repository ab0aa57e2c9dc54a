"""Agreement of two evaluations of several policies: a world model, a proxy or logs against real episodes.

Metrics of the means: correlations (Pearson, Spearman, Kendall's tau-b), MMRV (SIMPLER, Li et al. 2024), fraction of
pairs in the same order, regret of selecting by the prediction, bias and slope. With common starts: Cohen's kappa per
episode and the prediction-powered estimate of every policy (Angelopoulos et al. 2023). Intervals come from a bootstrap
over policies and episodes, because a dozen policies are a small sample for any number of episodes.

All metrics map `real` and `predicted` values `(..., P)` of P policies, higher is better, to `(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval, paired_difference
from robopolicy.evaluation.result import EvalResult

Array = NDArray[np.float64]
MINIMUM_POLICIES = 5  # required for an order

NAMES = {
    "pearson": "Pearson r",
    "spearman": "Spearman rho",
    "kendall": "Kendall tau-b",
    "mmrv": "MMRV (0 is best)",
    "pairwise": "pairs in the same order",
    "significant": "significantly different pairs in the same order",
    "regret": "regret of the best predicted",
    "slope": "slope of real on predicted",
    "bias": "bias, predicted minus real",
    "kappa": "Cohen's kappa per episode",
}
"""Metrics in printing order."""


def pearson(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the linear correlation; NaN where one side is constant."""
    a, b = _centred(real), _centred(predicted)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def spearman(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the rank correlation; ties have the mean of their ranks."""
    return pearson(_ranks(real), _ranks(predicted))


def kendall(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute tau-b: concordant minus discordant pairs, over the geometric mean of the untied pairs of each side."""
    a, b = np.sign(_differences(real)), np.sign(_differences(predicted))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum((-2, -1)) / np.sqrt((a * a).sum((-2, -1)) * (b * b).sum((-2, -1)))


def mmrv(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the mean over policies of the largest real difference to a policy in the wrong order; 0 is best.

    As in SIMPLER, strict inequalities are compared, so a predicted tie counts as an error of the better policy.
    """
    gap = _differences(real)
    wrong = (gap > 0) != (_differences(predicted) > 0)
    return np.where(wrong, np.abs(gap), 0.0).max(-1).mean(-1)


def pairwise_accuracy(real: ArrayLike, predicted: ArrayLike, pairs: ArrayLike | None = None) -> Array:
    """Compute the fraction of pairs with different real values in the predicted order; a predicted tie counts one half.

    `pairs` `(..., P, P)` restricts the pairs. NaN without any.
    """
    gap, guess = np.sign(_differences(real)), np.sign(_differences(predicted))
    counted = gap != 0 if pairs is None else (gap != 0) & np.asarray(pairs, np.bool_)
    with np.errstate(invalid="ignore"):
        return np.where(counted, (1 + gap * guess) / 2, 0.0).sum((-2, -1)) / counted.sum((-2, -1))


def top1_regret(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the real value lost by selecting the best predicted policy; ties use the mean of the policies."""
    values, guess = _array(real), _array(predicted)
    chosen = guess == guess.max(-1, keepdims=True)
    return values.max(-1) - (values * chosen).sum(-1) / chosen.sum(-1)


def bias(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the mean of predicted minus real."""
    return (_array(predicted) - _array(real)).mean(-1)


def calibration_slope(real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the least-squares slope of real on predicted; below 1, the prediction exaggerates differences."""
    a, b = _centred(real), _centred(predicted)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / (b * b).sum(-1)


def cohen_kappa(agreement: ArrayLike, real: ArrayLike, predicted: ArrayLike) -> Array:
    """Compute the agreement of binary outcomes beyond chance from the observed agreement and both success rates."""
    observed, a, b = _array(agreement), _array(real), _array(predicted)
    chance = a * b + (1 - a) * (1 - b)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(chance < 1, (observed - chance) / (1 - chance), np.nan)


OF_MEANS: dict[str, Callable[[ArrayLike, ArrayLike], Array]] = {
    "pearson": pearson,
    "spearman": spearman,
    "kendall": kendall,
    "mmrv": mmrv,
    "pairwise": pairwise_accuracy,
    "regret": top1_regret,
    "slope": calibration_slope,
}
"""Metrics of the means of several policies."""


def prediction_powered(real: ArrayLike, paired: ArrayLike, extra: ArrayLike, level: float = 0.95) -> Interval:
    """Estimate the real mean from few real and many predicted episodes, unbiased for any prediction.

    The estimate is mean(real) + mean(extra) - mean(paired). Its normal interval is narrower than the interval of the
    real episodes where the prediction agrees with them.

    `paired` `(n,)` are predictions for the starts of `real` `(n,)`, `extra` `(N,)` for others of the same distribution.
    """
    y, f, more = _array(real), _array(paired), _array(extra)
    if y.shape != f.shape or y.size < 2 or more.size < 2:
        raise ValueError(f"Need n >= 2 paired and N >= 2 extra outcomes, got {y.size}, {f.size} and {more.size}.")
    error = y - f
    estimate = float(error.mean() + more.mean())
    spread = float(np.sqrt(error.var(ddof=1) / y.size + more.var(ddof=1) / more.size))
    half = NormalDist().inv_cdf(0.5 + level / 2) * spread
    return Interval(estimate, estimate - half, estimate + half, y.size, level)


@dataclass(frozen=True, eq=False)
class Ranking:
    """Real against predicted outcomes of P policies."""

    names: tuple[str, ...]  # (P,)
    real: tuple[Interval, ...]  # (P,) success rate, or mean return where the task defines no success
    predicted: tuple[Interval, ...]  # (P,)
    powered: tuple[Interval, ...] | None  # (P,) prediction-powered; None without further predicted starts
    metrics: dict[str, Interval]  # keys of `NAMES` that can be computed
    notes: tuple[str, ...]  # remarks for the reader
    passed: bool | None  # whether the prediction may rank such policies; None if they are too alike to tell
    verdict: str  # `passed` and its reason in one sentence

    def values(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and one row per policy, sorted by real value."""
        powered = self.powered or (None,) * len(self.names)
        order = sorted(range(len(self.names)), key=lambda i: -self.real[i].estimate)
        rows = [
            [self.names[i], f"{self.real[i]}", f"{self.predicted[i]}", *([f"{powered[i]}"] if powered[i] else [])]
            for i in order
        ]
        return ["policy", "real", "predicted", *(["real and predicted"] if self.powered else [])], rows

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and one row per metric."""
        return ["metric", "value"], [[NAMES[key], f"{value}"] for key, value in self.metrics.items()]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "policies": {
                name: {
                    "real": self.real[i].to_dict(),
                    "predicted": self.predicted[i].to_dict(),
                    "powered": self.powered[i].to_dict() if self.powered else None,
                }
                for i, name in enumerate(self.names)
            },
            "metrics": {key: value.to_dict() for key, value in self.metrics.items()},
            "notes": list(self.notes),
            "passed": self.passed,
            "verdict": self.verdict,
        }


def rank(
    real: Mapping[str, EvalResult],
    predicted: Mapping[str, EvalResult],
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> Ranking:
    """Compare two evaluations of the same policies.

    Results of one side must have the same episode seeds; `predicted` ideally has the seeds of `real` and more.
    A UserError is raised if the policies, their seeds or the kinds of outcome differ.
    """
    names = tuple(real)
    if set(predicted) != set(names) or not names:
        raise UserError(f"Both sides need the same policies, got {sorted(real)} and {sorted(predicted)}.")
    first, second = ([side[name] for name in names] for side in (real, predicted))
    if len({result.success is None for result in (*first, *second)}) > 1:
        raise UserError("Results with and without success cannot be compared; evaluate all on one task.")
    y, f = _matrix(first, "real"), _matrix(second, "predicted")  # (P, n), (P, N)
    common, a, b = np.intersect1d(first[0].seeds, second[0].seeds, return_indices=True)
    if not all(result.seeded for result in (*first, *second)):
        common, a, b = common[:0], a[:0], b[:0]
    paired = len(common) == y.shape[1] == f.shape[1]
    if paired:
        y, f = y[:, a], f[:, b]
    draws = _resample(np.random.default_rng(seed), y, f, paired, resamples)
    found: dict[str, tuple[Array, Array]] = {"bias": (bias(y.mean(1), f.mean(1)), bias(draws.real, draws.predicted))}
    notes: list[str] = []
    order = _significant(first)
    if len(names) < MINIMUM_POLICIES:
        notes.append(f"Not enough policies for correlations and ranks: {len(names)}, at least {MINIMUM_POLICIES}.")
    else:
        found |= {key: (of(y.mean(1), f.mean(1)), of(draws.real, draws.predicted)) for key, of in OF_MEANS.items()}
        pairs = order != 0
        if pairs.any():
            drawn = pairs[draws.policies[:, :, None], draws.policies[:, None, :]]
            found["significant"] = (
                pairwise_accuracy(y.mean(1), f.mean(1), pairs),
                pairwise_accuracy(draws.real, draws.predicted, drawn),
            )
    if paired and first[0].success is not None:
        drawn_rates = (draws.agreement.mean(1), draws.real.mean(1), draws.predicted.mean(1))
        found["kappa"] = cohen_kappa((y == f).mean(), y.mean(), f.mean()), cohen_kappa(*drawn_rates)
    metrics = {key: _interval(*found[key], len(names), level) for key in NAMES if key in found}
    notes += [
        f"{NAMES[key]}: undefined, because one side is constant." for key in metrics if np.isnan(metrics[key].estimate)
    ]
    rest = np.setdiff1d(np.arange(f.shape[1]), b)
    powered = None
    if len(common) >= 2 and rest.size >= 2:
        powered = tuple(prediction_powered(y[i, a], f[i, b], f[i, rest], level) for i in range(len(names)))
    means = [tuple(r.success_interval(level) or r.return_interval(level) for r in side) for side in (first, second)]
    passed, verdict = _verdict(names, means, order, _significant(second))
    return Ranking(names, means[0], means[1], powered, metrics, tuple(notes), passed, verdict)


def _verdict(
    names: tuple[str, ...], means: Sequence[Sequence[Interval]], real: Array, predicted: Array
) -> tuple[bool | None, str]:
    """Check that the best and the worst policy are distinguished, and that no other pair is reversed.

    `means` are the real and predicted values `(2, P)`, `real` and `predicted` the results of `_significant` `(P, P)`.
    """
    values = np.array([[interval.estimate for interval in side] for side in means])
    best, worst = int(values[0].argmax()), int(values[0].argmin())
    if real[best, worst] <= 0:
        return None, "none, because the policies do not differ significantly in reality; add expert and random."
    scores = ", ".join(
        f"{names[i]} {values[0, i]:.3g} in reality and {values[1, i]:.3g} predicted" for i in (best, worst)
    )
    if predicted[best, worst] <= 0:
        return False, f"the prediction must not rank policies: it does not distinguish {scores}."
    count, reversed_pairs = int((real > 0).sum()), np.argwhere((real > 0) & (predicted < 0))
    if len(reversed_pairs):
        better, other = (names[i] for i in reversed_pairs[0])
        pairs = f"{len(reversed_pairs)} of {count} pairs that differ in reality, among them {better} and {other}"
        return False, f"the prediction must not rank policies: it reverses {pairs}."
    return (
        True,
        f"the prediction may rank such policies: it distinguishes {scores}, and reverses none of {count} pairs.",
    )


@dataclass(frozen=True, eq=False)
class _Draws:
    """Bootstrap replicates."""

    policies: NDArray[np.int64]  # (R, P)
    real: Array  # (R, P) means of the resampled policies over resampled episodes
    predicted: Array  # (R, P)
    agreement: Array  # (R, P) fraction of the episodes that agree; zeros for unpaired episodes


def _resample(rng: np.random.Generator, y: Array, f: Array, paired: bool, resamples: int) -> _Draws:
    """Resample policies and episodes; all policies share the episodes, and so do both sides where they are paired."""
    policies = rng.integers(len(y), size=(resamples, len(y)))

    def counts(n: int) -> Array:
        return rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)

    def means(count: Array, values: Array) -> Array:
        # sums of integers before the division, so that equal rates are exactly equal
        return np.take_along_axis(count @ values.T / values.shape[1], policies, 1)

    first = counts(y.shape[1])  # (R, n)
    second = first if paired else counts(f.shape[1])
    drawn = means(first, y), means(second, f)
    agreement = means(first, (y == f).astype(np.float64)) if paired else np.zeros_like(drawn[0])
    return _Draws(policies, *drawn, agreement)


def _matrix(results: list[EvalResult], label: str) -> Array:
    """Return outcomes `(P, n)`, columns by seed."""
    seeds = results[0].seeds
    if any(not np.array_equal(result.seeds, seeds) for result in results):
        raise UserError(f"The {label} results have different episodes; evaluate all with the same --seed, --episodes.")
    return np.stack([result.outcomes for result in results])


def _significant(results: list[EvalResult]) -> Array:
    """Return 1, or -1, `(P, P)` where the first policy is significantly better, or worse, on common starts; else 0."""
    found = np.zeros((len(results), len(results)))
    if results[0].n < 2 or not all(result.seeded for result in results):
        return found
    for i in range(len(results)):
        for j in range(i):
            a, b = (result.returns if result.success is None else result.success for result in (results[i], results[j]))
            difference = paired_difference(a, b, resamples=2_000).difference
            sign = float(difference.low > 0) - float(difference.high < 0)  # of b minus a
            found[i, j], found[j, i] = -sign, sign
    return found


def _interval(estimate: Array, draws: Array, n: int, level: float) -> Interval:
    known = draws[~np.isnan(draws)]  # a resample of a single policy has no correlation
    if not known.size or np.isnan(estimate):
        return Interval(float(estimate), np.nan, np.nan, n, level)
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high), n, level)


def _array(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def _centred(values: ArrayLike) -> Array:
    array = _array(values)
    centred = array - array.mean(-1, keepdims=True)
    constant = (array == array[..., :1]).all(-1, keepdims=True)  # rounding must not give a variance
    return np.where(constant, 0.0, centred)


def _differences(values: ArrayLike) -> Array:
    """Return `(..., P, P)`: value of the first policy minus value of the second."""
    array = _array(values)
    return array[..., :, None] - array[..., None, :]


def _ranks(values: ArrayLike) -> Array:
    gap = _differences(values)
    return (gap > 0).sum(-1) + ((gap == 0).sum(-1) + 1) / 2
