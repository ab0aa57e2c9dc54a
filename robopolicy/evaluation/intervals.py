"""Confidence intervals and tests for success rates and returns.

* `wilson`: success rate (Wilson 1927), also accurate at 0 % and 100 %.
* `student_mean`: mean of a few approximately normal values, one per training seed (Student 1908).
* `bootstrap_mean`: mean of any values (Efron 1987, BCa by default, percentile on request).
* `iqm`: interquartile mean of many runs (Agarwal et al. 2021).
* `paired_difference`: two policies on the same seeds (Newcombe 1998b), narrower than two separate intervals.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robopolicy.evaluation.student import two_sided_quantile
from robopolicy.plurals import counted

Array = NDArray[np.float64]
MINIMUM_EPISODES = 100
_BLOCK = 2_000_000  # numbers per block of resamples, which bounds the memory


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float  # NaN with fewer than two observations
    high: float
    n: int  # independent observations
    level: float = 0.95

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        if math.isnan(self.low) or math.isnan(self.high):  # of one observation
            return f"{self.estimate:{spec}}"
        return f"{self.estimate:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def within(self, lowest: float, highest: float) -> Interval:
        """The part of the interval within the range of the quantity; NaN bounds stay."""
        low, high = (
            min(max(bound, lowest), highest) if not math.isnan(bound) else bound for bound in (self.low, self.high)
        )
        return replace(self, low=low, high=high)

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready form; None where a number is unknown."""
        return {key: None if math.isnan(value) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class PairedDifference:
    """Difference on common seeds, second minus first."""

    difference: Interval  # mean of the per-seed differences
    wins: int  # seeds where the second is better
    losses: int  # seeds where the first is better
    ties: int
    p_value: float  # two-sided: McNemar's exact test of binary outcomes, a sign-flip test of the mean of others

    @property
    def is_distinct(self) -> bool:
        """Whether both the interval and the test find a difference."""
        excluded = self.difference.low > 0 or self.difference.high < 0
        return excluded and self.p_value < 1 - self.difference.level


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson score interval of the rate `successes` / `n`."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"Need 0 <= successes <= n and n >= 1, got {successes} of {n}.")
    low, high = wilson_bounds(successes / n, n, level)
    return Interval(successes / n, low, high, n, level)


def wilson_bounds(rate: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Bounds of Wilson's interval of a `rate` from `n` independent outcomes; `n` need not be whole."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # exact at both ends, where the formula is subject to rounding
    return 0.0 if rate == 0 else centre - half, 1.0 if rate == 1 else centre + half


def bootstrap_mean(
    values: ArrayLike,
    *,
    level: float = 0.95,
    method: Literal["bca", "percentile"] = "bca",
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of the mean of `values` `(n,)`.

    BCa corrects the percentile interval for bias and skewness, which matters for returns with rare failures.
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    n = data.size
    if n == 0:
        raise ValueError("Cannot bootstrap an empty sample.")
    mean = float(data.mean())
    spread = data - mean
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1, level)
    if not spread.any():
        return Interval(mean, mean, mean, n, level)
    means = _resampled_means(data, resamples, np.random.default_rng(seed))
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    if method == "bca":
        normal = NormalDist()
        below = np.mean(means < mean) + np.mean(means == mean) / 2
        bias = normal.inv_cdf(float(np.clip(below, 1 / resamples, 1 - 1 / resamples)))
        skew = float((spread**3).sum() / (6 * (spread**2).sum() ** 1.5))  # jackknife acceleration of a mean
        z = bias + np.array([normal.inv_cdf(float(tail)) for tail in tails])
        tails = np.array([normal.cdf(float(value)) for value in bias + z / (1 - skew * z)])
    low, high = np.quantile(means, tails)
    return Interval(mean, float(low), float(high), n, level)


def student_mean(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Student's interval of the mean of a few values `(n,)`, such as one per training seed."""
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size == 0:
        raise ValueError("A mean needs at least one value.")
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, math.nan, math.nan, 1, level)
    half = two_sided_quantile(level, data.size - 1) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return Interval(mean, mean - half, mean + half, data.size, level)


def correlation_mean(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean of a few correlations `(n,)` with Student's interval on Fisher's scale, which stays within [-1, 1]."""
    largest = 1 - 1e-6  # finite on Fisher's scale
    mean = student_mean(np.arctanh(np.clip(np.asarray(values, dtype=np.float64), -largest, largest)), level=level)
    return Interval(math.tanh(mean.estimate), math.tanh(mean.low), math.tanh(mean.high), mean.n, level)


def iqm(values: ArrayLike) -> float:
    """Interquartile mean: mean of the middle half of the values."""
    data = np.sort(np.asarray(values, dtype=np.float64), axis=None)
    cut = data.size // 4
    return float(data[cut : data.size - cut].mean())


def paired_difference(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedDifference:
    """Compare outcomes `first` and `second` `(n,)` of two policies on the same seeds.

    Boolean outcomes use Newcombe's interval, which is valid when all pairs agree, and McNemar's exact test; others use
    a BCa bootstrap and a sign-flip test.
    """
    a, b = np.asarray(first).ravel(), np.asarray(second).ravel()
    if a.shape != b.shape:
        raise ValueError(f"Paired outcomes need equal lengths, got {a.size} and {b.size}.")
    delta = b.astype(np.float64) - a.astype(np.float64)
    wins, losses = int((delta > 0).sum()), int((delta < 0).sum())
    if a.dtype == np.bool_ and b.dtype == np.bool_:
        interval = paired_rates(int((a & b).sum()), wins, losses, int((~a & ~b).sum()), level)
        p_value = sign_test(wins, losses)
    else:
        interval = bootstrap_mean(delta, level=level, resamples=resamples, seed=seed)
        p_value = sign_flip_test(delta, resamples=resamples, seed=seed)
    return PairedDifference(interval, wins, losses, int(delta.size) - wins - losses, p_value)


def paired_rates(both: int, only_second: int, only_first: int, neither: int, level: float = 0.95) -> Interval:
    """Difference of two success rates on the same episodes, second minus first (Newcombe 1998, method 10).

    Combines the Wilson intervals of both rates and their correlation.
    """
    n = both + only_second + only_first + neither
    first, second = wilson(both + only_first, n, level), wilson(both + only_second, n, level)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    covariance = both * neither - only_first * only_second
    if covariance > 0:
        covariance = max(covariance - n / 2, 0)  # continuity correction
    correlation = covariance / math.sqrt(margins) if margins else 0.0

    def margin(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0))

    difference = second.estimate - first.estimate
    low = difference - margin(second.estimate - second.low, first.high - first.estimate)
    high = difference + margin(second.high - second.estimate, first.estimate - first.low)
    return Interval(difference, low, high, n, level)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value that wins and losses are equally likely; ties carry no information."""
    n = wins + losses
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip_test(delta: Array, *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of a mean of paired differences `(n,)`, whose signs are exchangeable without a difference."""
    rng = np.random.default_rng(seed)
    total, more = abs(float(delta.sum())), 0
    block = max(1, _BLOCK // delta.size)
    for start in range(0, resamples, block):
        signs = rng.integers(0, 2, size=(min(block, resamples - start), delta.size)) * 2.0 - 1.0
        more += int((np.abs(signs @ delta) >= total * (1 - 1e-9)).sum())
    return (1 + more) / (1 + resamples)


def sample_warning(n: int, *, rate: bool = True, minimum: int = MINIMUM_EPISODES) -> str | None:
    """Return a warning for fewer than `minimum` episodes, or None; with `rate` it states the uncertainty of a rate."""
    if n >= minimum:
        return None
    episodes = counted(n, "episode")
    if not rate:
        return f"Only {episodes}: the interval of the return is rough; use at least {minimum}."
    half, enough = (100 * (wilson(k // 2, k).high - 0.5) for k in (n + n % 2, minimum))
    return (
        f"Only {episodes}: a success rate near 50 % is uncertain by ±{half:.0f} points; "
        f"use at least {minimum} (±{enough:.0f})."
    )


def _resampled_means(data: Array, resamples: int, rng: np.random.Generator) -> Array:
    block = max(1, _BLOCK // data.size)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    return np.concatenate([data[rng.integers(data.size, size=(size, data.size))].mean(1) for size in sizes])
