"""SharpeRatio@k: what a portfolio of the k policies that an estimator likes best is worth for its risk (S139).

Estimators are usually judged by their error or their ranking. Before policies are tried out it matters more whether the
best of the k candidates beats the behaviour that plays now, and how bad the others may be:

    SharpeRatio@k = (best@k - J(behaviour)) / std@k

with the best and the standard deviation of the true values of the k policies with the highest estimates, the behaviour
being a candidate like any other. It is undefined for k = 1 and where all k are equally good.

Deviations from the authors' code (scope-rl): std@k is that of the portfolio itself, as in their documentation, while
the code divides by k - 1. As in the code, a portfolio without any policy better than the behaviour scores 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from robopolicy.errors import UserError


def sharpe_ratio(estimated: Mapping[str, float], real: Mapping[str, float], behaviour: str, k: int) -> float:
    """SharpeRatio@k of one estimator; NaN where it is undefined.

    Args:
        estimated: Value of every candidate according to the estimator, the behaviour included.
        real: True value of every candidate.
        behaviour: Name of the behaviour policy among them.
        k: Size of the portfolio.

    Raises:
        UserError: The candidates differ, lack the behaviour, or are fewer than k.
    """
    if set(estimated) != set(real) or behaviour not in real:
        raise UserError(f"SharpeRatio@k needs both values of the same policies, '{behaviour}' among them.")
    if not 1 <= k <= len(real):
        raise UserError(f"SharpeRatio@k of {len(real)} candidates needs 1 <= k <= {len(real)}, got {k}.")
    chosen = sorted(estimated, key=lambda name: -estimated[name])[:k]
    values = np.array([real[name] for name in chosen])
    if values.max() == values.min():  # rounding may leave a deviation
        return math.nan
    return max(float(values.max()) - real[behaviour], 0.0) / float(values.std())


def sharpe_table(
    estimators: Mapping[str, Mapping[str, float]], real: Mapping[str, float], behaviour: str
) -> tuple[list[str], list[list[str]]]:
    """Header and one row per estimator: SharpeRatio@k for every k >= 2."""
    sizes = range(2, len(real) + 1)
    rows = [
        [name, *(f"{sharpe_ratio(values, real, behaviour, k):.2f}" for k in sizes)]
        for name, values in estimators.items()
    ]
    return ["estimator", *(f"k = {k}" for k in sizes)], rows
