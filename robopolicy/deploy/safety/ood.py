"""Out-of-distribution checks of observations and actions during deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.constraints import OpenFraction, PositiveInt, Validated
from robopolicy.data.ood_detector import OODDetector
from robopolicy.errors import UserError, unknown_name

DEVIATIONS = 3.0  # half-width of ranges without quantiles, in standard deviations
MIN_RANGE = 1e-3  # [units of the observation] minimum width of a range, for constant sensors


class ObservationRange(NamedTuple):
    """Range of one observation in the training data."""

    low: NDArray[np.float64]  # (D,)
    high: NDArray[np.float64]  # (D,)


@dataclass(frozen=True)
class ObservationGateConfig:
    """Hysteresis of the gate; the excess is the distance from the data range, in units of the range."""

    close: float = 0.5  # excess above which an observation is out of distribution
    open: float = 0.25  # excess up to which it is in distribution
    close_after: int = 3  # consecutive observations out of distribution that close the gate
    open_after: int = 10  # consecutive observations in distribution that open it

    def __post_init__(self) -> None:
        if not (0.0 <= self.open <= self.close and self.close_after >= 1 and self.open_after >= 1):
            raise UserError("The observation gate needs 0 <= open <= close and at least one observation for either.")


class RangeViolation(NamedTuple):
    """Entry of an observation with the largest excess."""

    key: str  # "state[3]"
    value: float
    limit: float  # nearest value within the data range
    excess: float  # in units of the data range; inf for NaN


class ObservationGate:
    """Gate that closes for observations far outside of the data range, with hysteresis in excess and time."""

    def __init__(self, ranges: Mapping[str, ObservationRange], config: ObservationGateConfig | None = None) -> None:
        self.ranges, self.config = dict(ranges), config or ObservationGateConfig()
        self.closed = False
        self._run = 0  # consecutive observations that support a change of state

    @classmethod
    def from_statistics(
        cls, statistics: Mapping[str, Mapping[str, Any]], config: ObservationGateConfig | None = None
    ) -> Self:
        """Create a gate from statistics per observation: `q01` and `q99`, or `mean` and `std` `(D,)`; no cameras."""
        ranges = {}
        for key, stats in statistics.items():
            if key.startswith("image"):
                continue
            if "q01" in stats and "q99" in stats:
                low, high = np.asarray(stats["q01"], np.float64), np.asarray(stats["q99"], np.float64)
            elif "mean" in stats and "std" in stats:
                mean, std = np.asarray(stats["mean"], np.float64), np.asarray(stats["std"], np.float64)
                low, high = mean - DEVIATIONS * std, mean + DEVIATIONS * std
            else:
                raise UserError(f"Statistics of '{key}' have neither q01 and q99 nor mean and std.")
            ranges[key] = ObservationRange(low, high)
        return cls(ranges, config)

    def update(self, obs: Mapping[str, NDArray[Any]]) -> RangeViolation:
        """Update the gate with an observation `{key: (..., D)}` and return the entry with the largest excess."""
        found = [self._excess(key, ranges, obs) for key, ranges in self.ranges.items()]
        worst = max(found, key=lambda violation: violation.excess, default=RangeViolation("", 0.0, 0.0, 0.0))
        change = worst.excess <= self.config.open if self.closed else worst.excess > self.config.close
        self._run = self._run + 1 if change else 0
        needed = self.config.open_after if self.closed else self.config.close_after
        if self._run >= needed or (worst.excess == np.inf and not self.closed):
            self.closed, self._run = not self.closed, 0
        return worst

    @staticmethod
    def _excess(key: str, ranges: ObservationRange, obs: Mapping[str, NDArray[Any]]) -> RangeViolation:
        value = np.asarray(obs.get(key, np.nan), np.float64)
        if value.shape[-1:] != ranges.low.shape or not np.isfinite(value).all():
            return RangeViolation(key, np.nan, np.nan, np.inf)
        value = value.reshape(-1, len(ranges.low))
        width = np.maximum(ranges.high - ranges.low, MIN_RANGE)
        excess = np.maximum(ranges.low - value, value - ranges.high) / width
        row, column = np.unravel_index(int(np.argmax(excess)), excess.shape)
        worst = float(value[row, column])
        limit = float(np.clip(worst, ranges.low[column], ranges.high[column]))
        return RangeViolation(f"{key}[{column}]", worst, limit, max(0.0, float(excess[row, column])))


RESPONSES = ("hold", "slow", "refuse")


@dataclass(frozen=True)
class ActionOODConfig(Validated):
    """Response to out-of-distribution actions."""

    response: str = "hold"  # hold (after too many) | slow (move a fraction of the way) | refuse (hold immediately)
    slow_fraction: OpenFraction = 0.3  # fraction of the way with `slow`
    max_consecutive: PositiveInt = 3  # consecutive out-of-distribution actions that hold the robot with any response

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.response not in RESPONSES:
            raise unknown_name("response", self.response, RESPONSES)


class ActionOODResult(NamedTuple):
    """Result of the check of one action."""

    fraction: float  # fraction of the action to execute
    hold: bool  # whether to hold the robot
    score: float  # log-density, or minus a distance
    threshold: float  # minimum score of actions in distribution


class ActionOODCheck:
    """Out-of-distribution check of actions, with a count of consecutive violations."""

    def __init__(self, gate: OODDetector, config: ActionOODConfig | None = None) -> None:
        self.gate, self.config = gate, config or ActionOODConfig()
        self._run = 0

    def check(self, obs: Mapping[str, NDArray[Any]], action: NDArray[Any]) -> ActionOODResult:
        """Check an action `(A,)` for an observation `{key: (...)}`; raises `UserError` for other keys or sizes."""
        batch = {key: torch.from_numpy(np.asarray(obs[key], np.float32))[None] for key in self.gate.keys if key in obs}
        point = self.gate.point(batch, torch.from_numpy(np.asarray(action, np.float32))[None])
        score, threshold = float(self.gate.score(point)), self.gate.threshold
        if score >= threshold:
            self._run = 0
            return ActionOODResult(1.0, False, score, threshold)
        self._run += 1
        fraction = {"hold": 1.0, "slow": self.config.slow_fraction, "refuse": 0.0}[self.config.response]
        return ActionOODResult(fraction, self._run >= self.config.max_consecutive, score, threshold)
