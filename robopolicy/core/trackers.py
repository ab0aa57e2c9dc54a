"""Running estimates per key (prompt, task, reset state), and of mean and standard deviation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, Positive
from robopolicy.core.distributed import all_gather_moments
from robopolicy.plugins import Registry


class Tracker(ABC):
    """A running estimate per integer key."""

    @abstractmethod
    def read(self, keys: Tensor) -> Tensor:
        """Estimates `(N,)` float for keys `(N,)`; the prior for new keys."""

    @abstractmethod
    def write(self, keys: Tensor, values: Tensor, keep: Tensor | None = None) -> None:
        """Add observations `(N,)` for keys `(N,)`, in order; `keep` (N,) replaces the weight of the past."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Keys and estimates as tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""


class BetaTracker(Tracker):
    """Success probability per key as a Beta distribution whose counts decay before each observation.

    A factor of 1 gives the running average including the prior counts. Source: Xu and Ding 2025.
    """

    def __init__(self, forgetting: Fraction = 0.96, successes: Positive = 1.0, failures: Positive = 1.0) -> None:
        """Set the factor `forgetting` on both counts per observation, in (0, 1], and the prior counts."""
        self.forgetting = forgetting
        self.prior = (successes, failures)
        self._counts: dict[int, tuple[float, float]] = {}

    def read(self, keys: Tensor) -> Tensor:
        """Success probabilities `(N,)`."""
        counts = [self._counts.get(key, self.prior) for key in integers(keys)]
        return torch.tensor([won / (won + lost) for won, lost in counts], dtype=torch.float64)

    def write(self, keys: Tensor, values: Tensor, keep: Tensor | None = None) -> None:
        """Add outcomes in [0, 1]."""
        kept = floats(torch.full_like(values, self.forgetting) if keep is None else keep)
        for key, value, share in zip(integers(keys), floats(values), kept, strict=True):
            won, lost = self._counts.get(key, self.prior)
            self._counts[key] = (share * won + value, share * lost + 1.0 - value)

    def state_dict(self) -> dict[str, Any]:
        """Keys (M,) and counts (M, 2)."""
        return {
            "keys": torch.tensor(list(self._counts), dtype=torch.int64),
            "counts": torch.tensor(list(self._counts.values()), dtype=torch.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        won, lost = floats(state["counts"][:, 0]), floats(state["counts"][:, 1])
        self._counts = dict(zip(integers(state["keys"]), zip(won, lost, strict=True), strict=True))


class RunningMoments:
    """Running mean and population standard deviation, updated per batch on its device (Chan et al.)."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = self.square = torch.zeros((), dtype=torch.float64)  # (); sum of squared deviations

    def observe(self, values: Tensor) -> None:
        """Add values of any shape, of all processes."""
        if values.numel() == 0:
            return
        batch = values.detach().double()
        own = batch.mean()
        for rows, mean, square in all_gather_moments(batch.numel(), own, ((batch - own) ** 2).sum()):
            count, before = float(rows), self.mean.to(mean.device)
            delta, total = mean - before, self.count + count
            self.square = self.square.to(mean.device) + (square + delta**2 * self.count * count / total)
            self.mean = before + delta * count / total
            self.count = total

    @property
    def std(self) -> Tensor:
        """Standard deviation `()`; 1 for fewer than two values."""
        return (self.square / self.count).sqrt() if self.count > 1 else torch.ones_like(self.square)

    def state_dict(self) -> dict[str, Any]:
        """Count, mean and sum of squared deviations."""
        return {"count": self.count, "mean": float(self.mean), "square": float(self.square)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.count = float(state["count"])
        self.mean, self.square = (torch.tensor(state[key], dtype=torch.float64) for key in ("mean", "square"))


TRACKERS: Registry[Callable[..., Tracker]] = Registry("parts.tracker", {"beta": BetaTracker})


def integers(keys: Tensor) -> list[int]:
    """Convert keys to Python integers."""
    return cast(list[int], keys.long().tolist())  # pyright: ignore[reportUnknownMemberType]


def floats(values: Tensor) -> list[float]:
    """Convert a tensor to Python floats."""
    return cast(list[float], values.double().tolist())  # pyright: ignore[reportUnknownMemberType]
