"""The seed rule of the contract, kept in one place for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.errors import UserError


def numpy_words(seed: int) -> int | list[int]:
    """What numpy's older generators (`RandomState`, `numpy.random.seed`) take for `seed`: beyond 32 bits its words."""
    return seed if seed < 2**32 else [seed % 2**32, seed >> 32]


class SeedCounter:
    """Hands out episode seeds: `seed + i` at a reset, then the next unused integer in order of environment."""

    def __init__(self, num_envs: int) -> None:
        self.current: NDArray[np.int64] = np.zeros(num_envs, np.int64)  # (N,) seed of the episode now running
        self._first: list[int] | None = None  # seeds of a reset that has just been asked for
        self._next = 0

    def reset(self, seed: int | Sequence[int]) -> None:
        """Prepare the seeds that the next `take` of all rows returns."""
        count = len(self.current)
        seeds = [int(seed) + i for i in range(count)] if isinstance(seed, int | np.integer) else [int(s) for s in seed]
        if len(seeds) != count:
            raise UserError(f"Expected one seed or {count} of them, one per environment, got {len(seeds)}.")
        if min(seeds) < 0:
            raise UserError(f"Seeds must be 0 or larger, got {min(seeds)}.")
        self._first = seeds
        self._next = max(seeds) + 1

    def take(self, rows: NDArray[np.intp]) -> list[int]:
        """Seeds of the episodes that now start in `rows` (ascending)."""
        seeds = self._first
        if seeds is None:
            seeds = list(range(self._next, self._next + len(rows)))
            self._next += len(rows)
        self._first = None
        self.current[rows] = seeds
        return seeds

    def state_dict(self) -> dict[str, Any]:
        """Seeds running and the next unused one."""
        return {"current": torch.from_numpy(self.current.copy()), "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        current = state["current"].numpy()
        if current.shape != self.current.shape:
            raise UserError(f"Expected the state of {len(self.current)} environments, got that of {len(current)}.")
        self.current[:] = current
        self._next = int(state["next"])
