"""Student's t distribution: tail probabilities and quantiles for any positive degrees of freedom."""

from __future__ import annotations

import math
from functools import lru_cache


def two_sided_p(t: float, freedom: float) -> float:
    """P(|T| > |t|) with `freedom` degrees of freedom (Abramowitz and Stegun 26.7.1 and 26.5.27)."""
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@lru_cache(maxsize=1024)
def two_sided_quantile(level: float, freedom: float) -> float:
    """Return t with P(|T| <= t) = `level`, which is below 1."""
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > 1 - level:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - level else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = value
        for term in (even, odd):
            lower = 1 / (1 + term * lower)
            upper = 1 + term / upper
            value *= upper * lower
        if abs(value - before) <= 1e-15 * abs(value):
            break
    return math.exp(scale) * value / a
