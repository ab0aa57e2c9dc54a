"""Pareto dominance between rows of objectives."""

from __future__ import annotations

from torch import Tensor


def dominance_matrix(values: Tensor) -> Tensor:
    """Bool `[i, j]`: row i of objectives `(K, O)`, higher is better, dominates row j."""
    mine, other = values[:, None], values
    return (mine >= other).all(2) & (mine > other).any(2)
