"""What a probability is worth: temperature, reliability and the threshold, all on held-out labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_LOG_TEMPERATURES = (-4.0, 4.0)  # where the temperature is looked for
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class Reliability:
    """How often what was given a probability came true, by bins of equal width; bins without any are left out."""

    confidence: Array  # (b,) mean probability
    frequency: Array  # (b,) share that came true
    count: NDArray[np.int64]  # (b,)

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of both, weighted by count."""
        return float(np.abs(self.confidence - self.frequency) @ self.count / self.count.sum())


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """Temperature by which to divide `logits` `(n,)` for the highest likelihood of `labels` `(n,)` (Guo et al. 2017).

    It changes no decision, only how sure it sounds. The likelihood has one maximum, found by golden sections. Labels
    are smoothed by one more observation of either kind (Platt 1999), or a judge without errors would become infinitely
    sure.
    """
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    wins, losses = y.sum(), (1 - y).sum()
    y = np.where(y > 0.5, (wins + 1) / (wins + 2), 1 / (losses + 2))

    def loss(log_temperature: float) -> float:
        scaled = z * np.exp(-log_temperature)
        return float((np.logaddexp(0, scaled) - y * scaled).mean())

    low, high = _LOG_TEMPERATURES
    while high - low > 1e-4:
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return float(np.exp((low + high) / 2))


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = 10) -> Reliability:
    """Sort `probabilities` `(n,)` of `labels` `(n,)` into bins."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    place = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    filled = count > 0
    sums = (np.bincount(place, weights, minlength=bins)[filled] for weights in (p, y))
    confidence, frequency = (total / count[filled] for total in sums)
    return Reliability(confidence, frequency, count[filled])


def best_threshold(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Threshold with the largest sum of sensitivity and specificity (Youden); 0.5 where `labels` know one class alone.

    It lies halfway between the two probabilities that it separates.
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.bool_)
    if y.all() or not y.any():
        return 0.5
    values = np.unique(p)
    candidates = np.concatenate([[values[0] / 2], (values[1:] + values[:-1]) / 2, [(1 + values[-1]) / 2]])
    positives, negatives = np.sort(p[y]), np.sort(p[~y])
    missed = np.searchsorted(positives, candidates) / len(positives)
    kept = np.searchsorted(negatives, candidates) / len(negatives)
    return float(candidates[np.argmax(kept - missed)])
