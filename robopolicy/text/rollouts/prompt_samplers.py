"""Samplers of tasks: uniform, or by uncertainty.

Every sampler draws the tasks of one proposal without replacement, so that no two groups share a key. A sampler that
learns from outcomes does so in `observe`; before the first outcome it is uniform unless stated otherwise.
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
        self._order: list[int] = []  # of this epoch, what is left
        self._places = {task.key: place for place, task in enumerate(pool.tasks)}

    def propose(self, n: int) -> list[Task]:
        """The next of the epoch."""
        return [self.pool.tasks[place] for place in self.draw(n)]

    def draw(self, n: int) -> list[int]:
        """Places in the pool of the next `n` tasks of the epoch; all different."""
        count = self._enough(n)
        places, self._order = self._order[:n], self._order[n:]
        if missing := n - len(places):
            fresh = [place for place in self._shuffled(count) if place not in set(places)]
            places, self._order = places + fresh[:missing], fresh[missing:]
        return places

    def _shuffled(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self._generator).tolist()

    def weighted(self, weight: Tensor, n: int) -> list[int]:
        """`n` different places drawn with weights `(K,)`; those of weight 0 only when no others are left."""
        self._enough(n)
        return torch.multinomial(weight.double().clamp(min=1e-200), n, generator=self._generator).tolist()

    def _enough(self, n: int) -> int:
        """Size of the pool, which must hold `n` different tasks."""
        count = len(self.pool.tasks)
        if n > count:
            raise UserError(f"{n} different tasks were requested, but the pool has {count}; reduce the batch.")
        return count

    def keys(self) -> Tensor:
        """(K,) keys of the pool, in order."""
        return torch.tensor([task.key for task in self.pool.tasks])

    def state_dict(self) -> dict[str, Any]:
        """Generator and the rest of the epoch."""
        return {"generator": self._generator.get_state(), "order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])
        self._order = list(state["order"])


class Tracked(Uniform):
    """Base of the samplers that track the success rate of every task."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def rates(self) -> Tensor:
        """(K,) estimated success rates in [0, 1]."""
        return self.tracker.read(self.keys()).clamp(0.0, 1.0)

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """One observation per group: its mean reward."""
        for key in dict.fromkeys(keys.tolist()):
            mean = rewards[keys == key].double().mean().reshape(1)
            self.tracker.write(torch.tensor([key]), mean)

    def state_dict(self) -> dict[str, Any]:
        """Rates and generator."""
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
        """Uncertain tasks first."""
        rates = self.rates()
        weight = (rates * (1.0 - rates)).sqrt() + self.floor
        return [self.pool.tasks[place] for place in self.weighted(weight, n)]


SAMPLERS: Registry[type[Sampler]] = Registry(
    "parts.sampler",
    {
        "uniform": Uniform,
        "uncertain": UncertaintySampler,
    },
)
