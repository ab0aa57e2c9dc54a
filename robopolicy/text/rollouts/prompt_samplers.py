"""Samplers of tasks: uniform, or by uncertainty.

Every sampler draws the tasks of one proposal without replacement, so that no two groups share a key. Adaptive samplers
learn in `observe` and are uniform before the first outcome unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative
from robopolicy.core.trackers import BetaTracker, Tracker
from robopolicy.errors import UserError
from robopolicy.plugins import Registry
from robopolicy.text.rollouts.protocols import PromptPool, Sampler, Task


class Uniform(Sampler):
    """Shuffled epochs over the pool; the base class of the other samplers."""

    pool: PromptPool

    def setup(self, pool: PromptPool, seed: int) -> None:
        """Set the pool of tasks."""
        if not pool.tasks:
            raise UserError("There are no tasks to sample from.")
        self.pool = pool
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []  # remaining indices of this epoch
        self._indices = {task.key: index for index, task in enumerate(pool.tasks)}

    def propose(self, n: int) -> list[Task]:
        """Return the next tasks of the epoch."""
        return [self.pool.tasks[index] for index in self.draw(n)]

    def draw(self, n: int) -> list[int]:
        """Return indices into the pool of the next `n` tasks of the epoch; all different."""
        count = self._check_size(n)
        indices, self._order = self._order[:n], self._order[n:]
        if missing := n - len(indices):
            fresh = [index for index in self._shuffled(count) if index not in set(indices)]
            indices, self._order = indices + fresh[:missing], fresh[missing:]
        return indices

    def _shuffled(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self._generator).tolist()

    def weighted(self, weight: Tensor, n: int) -> list[int]:
        """Draw `n` different indices with weights `(K,)`; weight 0 only after all others."""
        self._check_size(n)
        return torch.multinomial(weight.double().clamp(min=1e-200), n, generator=self._generator).tolist()

    def _check_size(self, n: int) -> int:
        """Return the size of the pool, which must contain `n` different tasks."""
        count = len(self.pool.tasks)
        if n > count:
            raise UserError(f"{n} different tasks were requested, but the pool has {count}; reduce the batch.")
        return count

    def keys(self) -> Tensor:
        """Return the keys (K,) of the pool, in order."""
        return torch.tensor([task.key for task in self.pool.tasks])

    def state_dict(self) -> dict[str, Any]:
        """Return the generator and the rest of the epoch."""
        return {"generator": self._generator.get_state(), "order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])
        self._order = list(state["order"])


class Tracked(Uniform):
    """Base class of samplers that track the success rate of every task."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def rates(self) -> Tensor:
        """Return the estimated success rates (K,) in [0, 1]."""
        return self.tracker.read(self.keys()).clamp(0.0, 1.0)

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Track the mean reward of each group."""
        for key in dict.fromkeys(keys.tolist()):
            mean = rewards[keys == key].double().mean().reshape(1)
            self.tracker.write(torch.tensor([key]), mean)

    def state_dict(self) -> dict[str, Any]:
        """Return rates and generator."""
        return {**super().state_dict(), "tracker": self.tracker.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.tracker.load_state_dict(state["tracker"])


class UncertaintySampler(Tracked):
    """Tasks drawn with weight `sqrt(p (1 - p)) + floor` of their success rate p (single-stream, Xu and Ding 2025)."""

    def __init__(self, floor: NonNegative = 0.05, tracker: Tracker | None = None) -> None:
        super().__init__(tracker or BetaTracker())
        self.floor = floor

    def propose(self, n: int) -> list[Task]:
        """Draw weighted tasks."""
        rates = self.rates()
        weight = (rates * (1.0 - rates)).sqrt() + self.floor
        return [self.pool.tasks[index] for index in self.weighted(weight, n)]


SAMPLERS: Registry[type[Sampler]] = Registry("parts.sampler", {"uniform": Uniform, "uncertain": UncertaintySampler})
