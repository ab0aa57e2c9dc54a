"""Nearest state-action pairs of a dataset, as a target to stay close to and as a measure of novelty.

Exact search in a k-d tree (scipy). It is fast for vectors of about twenty numbers; for images search embeddings.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.optional import require

Array = NDArray[Any]

MIN_STD = 1e-3  # state dimensions that vary less are constant
PROBES = 2000  # pairs of the data that determine the usual distance


class NearestPairs:
    """N pairs, searched by the distance of `[beta * standardised state, action]`.

    A large `beta` finds the pair of the nearest state, independent of its action; 0 finds the nearest action of any
    state.
    """

    def __init__(self, state: Array, action: Array, *, beta: float = 1.0, threads: int = 1) -> None:
        """Build the tree.

        Args:
            state: (N, S) in any units; they are standardised by their own mean and standard deviation.
            action: (N, D) in comparable units, e.g. normalised ones.
            beta: Weight of the state.
            threads: Number of search threads.

        Raises:
            UserError: There are fewer than two pairs, a number is not finite, or scipy is missing.
        """
        if len(state) != len(action) or len(state) < 2:
            raise UserError(f"Nearest neighbors need two pairs, got {len(state)} states and {len(action)} actions.")
        if not (np.isfinite(state).all() and np.isfinite(action).all()):
            raise UserError("Nearest neighbors need finite numbers; clean the dataset.")
        self.beta, self.threads = beta, threads
        self.mean, std = state.mean(0, dtype=np.float64), state.std(0, dtype=np.float64)
        self.scale = np.where(std < MIN_STD, 1.0, std)
        self._tree: Any = require("scipy.spatial", "offline").cKDTree(self._key(state, action))

    def __len__(self) -> int:
        """Number of pairs."""
        return int(self._tree.n)

    def nearest(self, state: Array, action: Array) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Distance and row `(B,)` of the pair nearest to each of `state` `(B, S)` and `action` `(B, D)`."""
        return self._tree.query(self._key(state, action), workers=self.threads)

    def novelty(self, distance: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distances `(B,)` of `nearest` relative to the usual distance; above 1 a pair is unlike the data."""
        return distance / max(self.usual, np.finfo(np.float64).tiny)

    @cached_property
    def usual(self) -> float:
        """Distance within which 95 % of the data's pairs have another pair."""
        rows = np.unique(np.linspace(0, len(self) - 1, PROBES).astype(np.int64))
        distance, _ = self._tree.query(self._tree.data[rows], k=2, workers=self.threads)
        return float(np.quantile(distance[:, 1], 0.95))

    def _key(self, state: Array, action: Array) -> NDArray[np.float64]:
        return np.concatenate([self.beta * (state - self.mean) / self.scale, action], 1, dtype=np.float64)
