"""Prioritised sampling of the slots of a replay buffer by their errors (Schaul et al. 2015)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FLOOR = 1e-6  # added to every error, so that every slot can be sampled


class Priorities:
    """Priorities `error ** alpha` in a binary sum tree on the CPU; sampling and updates cost O(log n) per row."""

    def __init__(self, size: int, alpha: float, beta: float = 0.4) -> None:
        """Allocate `size` slots of priority 0.

        `alpha` is the exponent of the errors (0 is uniform), `beta` the exponent of the importance weights (1 corrects
        the bias in full).
        """
        self.alpha, self.beta = alpha, beta
        self.leaves = 1 << max(size - 1, 1).bit_length()
        self.tree: NDArray[np.float64] = np.zeros(2 * self.leaves)
        self.largest = 1.0  # priority of new slots, so that they are drawn soon

    def add(self, index: NDArray[np.int64], *, is_start: bool = True, active: NDArray[np.bool_] | None = None) -> None:
        """Give new slots `(K,)`, where `active`, the largest priority so far, or 0 if they cannot start a window."""
        index = index if active is None else index[active]
        self._set(index, np.full(len(index), self.largest if is_start else 0.0))

    def update(self, index: NDArray[np.int64], error: NDArray[np.float64], own: NDArray[np.bool_]) -> None:
        """Set the priorities of slots `(B,)` from absolute errors `(B,)` where `own` `(B,)`."""
        index, priority = index[own], (error[own] + FLOOR) ** self.alpha
        self.largest = max(self.largest, float(priority.max(initial=0.0)))
        self._set(index, priority)

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Sample slots by inverse transform of `uniform` in [0, 1)."""
        mass = uniform * self.tree[1]
        node = np.ones(len(uniform), np.int64)
        for _ in range(self.leaves.bit_length() - 1):
            node *= 2
            left = self.tree.take(node)
            right = (mass >= left) & (self.tree.take(node + 1) > 0)
            mass -= left * right
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


class DevicePriorities:
    """`Priorities` as prefix sums on a device: a draw takes a few kernels and no wait."""

    def __init__(self, size: int, alpha: float, beta: float = 0.4, *, device: torch.device) -> None:
        """Allocate `size` slots of priority 0; see `Priorities`."""
        self.alpha, self.beta, self.size = alpha, beta, size
        self.leaves = 1 << max(size - 1, 1).bit_length()
        self._value = torch.zeros(self.leaves + 1, dtype=torch.float64, device=device)  # the last is never drawn
        self._largest = torch.ones((), dtype=torch.float64, device=device)

    def add(self, index: Tensor, *, is_start: bool = True, active: Tensor | None = None) -> None:
        """Give new slots, where `active`, the largest priority so far, or 0."""
        index = index if active is None else torch.where(active, index, self.leaves)
        self._value[index] = self._largest if is_start else torch.zeros_like(self._largest)

    def update(self, index: Tensor, error: Tensor, own: Tensor) -> None:
        """Set priorities from absolute errors where `own`."""
        priority = (error + FLOOR) ** self.alpha
        self._largest = torch.maximum(self._largest, torch.where(own, priority, 0.0).max())
        self._value[torch.where(own, index, self.leaves)] = priority

    def draw(self, uniform: Tensor) -> Tensor:
        """Sample slots by inverse transform of `uniform`."""
        ends = self._value[:-1].cumsum(0)
        return torch.searchsorted(ends, uniform * ends[-1], right=True).clamp(max=self.size - 1)

    def weights(self, index: Tensor, count: Tensor) -> Tensor:
        """Importance weights, divided by their largest."""
        probability = (self._value[index] / self._value[:-1].sum()).clamp(min=1e-12)
        weight = (count * probability) ** -self.beta
        return weight / weight.max()

    def state_dict(self) -> dict[str, Any]:
        """Leaves and the largest priority."""
        return {"leaves": self._value[:-1].clone(), "largest": float(self._largest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._largest.fill_(float(state["largest"]))
        self._value[:-1] = state["leaves"].to(self._value.device)
