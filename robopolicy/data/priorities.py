"""Prioritised sampling of the slots of a replay buffer by their errors (Schaul et al. 2015)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FLOOR = 1e-6  # added to every error, so that every slot can be sampled


class Priorities:
    """Priorities `error ** alpha` in a binary sum tree; sampling and updates cost O(log n) per row."""

    def __init__(self, size: int, alpha: float, beta: float = 0.4) -> None:
        """Allocate `size` slots of priority 0.

        `alpha` is the exponent of the errors (0 is uniform), `beta` the exponent of the importance weights (1 corrects
        the bias in full).
        """
        self.alpha, self.beta = alpha, beta
        self.leaves = 1 << max(size - 1, 1).bit_length()
        self.tree: NDArray[np.float64] = np.zeros(2 * self.leaves)
        self.largest = 1.0  # priority of new slots, so that they are drawn soon

    def add(self, index: NDArray[np.int64], *, is_start: bool = True) -> None:
        """Give new slots the largest priority so far, or 0 if they cannot start a window."""
        self._set(index, np.full(len(index), self.largest if is_start else 0.0))

    def update(self, index: NDArray[np.int64], error: NDArray[np.float64]) -> None:
        """Set priorities from absolute errors."""
        priority = (error + FLOOR) ** self.alpha
        self.largest = max(self.largest, float(priority.max(initial=0.0)))
        self._set(index, priority)

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Sample slots by inverse transform of `uniform` in [0, 1)."""
        mass = uniform * self.tree[1]
        node = np.ones(len(uniform), np.int64)
        for _ in range(self.leaves.bit_length() - 1):
            node *= 2
            left = self.tree[node]
            right = (mass >= left) & (self.tree[node + 1] > 0)
            mass = np.where(right, mass - left, mass)
            node += right
        return node - self.leaves

    def weights(self, index: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """Importance weights `(n P(i)) ** -beta`, divided by their largest."""
        probability = np.maximum(self.tree[self.leaves + index] / self.tree[1], 1e-12)
        weight = (count * probability) ** -self.beta
        return weight / weight.max()

    def _set(self, index: NDArray[np.int64], value: NDArray[np.float64]) -> None:
        node = self.leaves + index
        self.tree[node] = value
        for _ in range(self.leaves.bit_length() - 1):
            node = node // 2
            self.tree[node] = self.tree[2 * node] + self.tree[2 * node + 1]

    def state_dict(self) -> dict[str, Any]:
        """Leaves and the largest priority."""
        return {"leaves": torch.from_numpy(self.tree[self.leaves :].copy()), "largest": self.largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.largest = float(state["largest"])
        self._set(np.arange(self.leaves), state["leaves"].numpy())
