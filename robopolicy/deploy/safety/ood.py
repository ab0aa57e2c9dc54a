"""Does an observation look like those the policy learned from? If not, its actions mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.constraints import Count, InnerShare, Ranged
from robopolicy.data.support import SupportGate
from robopolicy.errors import UserError, unknown_name

DEVIATIONS = 3.0  # standard deviations about the mean, where quantiles are not known
LEAST_RANGE = 1e-3  # [units of the observation] ranges below this are sensors that stood still


class Familiar(NamedTuple):
    """What the data of one observation covered."""

    low: NDArray[np.float64]  # (D,)
    high: NDArray[np.float64]  # (D,)


@dataclass(frozen=True)
class GateConfig:
    """When the gate closes and opens; excess is how far outside the data, in ranges of the data."""

    close: float = 0.5  # excess from which an observation is strange
    open: float = 0.25  # excess up to which it is familiar
    close_after: int = 3  # strange observations in a row that close the gate
    open_after: int = 10  # familiar ones in a row that open it

    def __post_init__(self) -> None:
        if not (0.0 <= self.open <= self.close and self.close_after >= 1 and self.open_after >= 1):
            raise UserError("The observation gate needs 0 <= open <= close and at least one observation for either.")


class Finding(NamedTuple):
    """The strangest number of an observation."""

    key: str  # "state[3]"
    value: float
    limit: float  # nearest value that the data covered
    excess: float  # in ranges of the data; inf for what is no number


class ObservationGate:
    """Closed while observations lie far outside what the data covered, with hysteresis in size and in time."""

    def __init__(self, familiar: Mapping[str, Familiar], config: GateConfig | None = None) -> None:
        self.familiar, self.config = dict(familiar), config or GateConfig()
        self.closed = False
        self._run = 0  # observations in a row that speak for the other position

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Mapping[str, Any]], config: GateConfig | None = None) -> Self:
        """From statistics per observation: `q01` and `q99`, or `mean` and `std`, each `(D,)`; cameras are left out."""
        familiar = {}
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
            familiar[key] = Familiar(low, high)
        return cls(familiar, config)

    def judge(self, obs: Mapping[str, NDArray[Any]]) -> Finding:
        """Take in an observation `{key: (..., D)}`, move the gate, and say what was strangest."""
        found = [self._excess(key, familiar, obs) for key, familiar in self.familiar.items()]
        worst = max(found, key=lambda finding: finding.excess, default=Finding("", 0.0, 0.0, 0.0))
        against = worst.excess <= self.config.open if self.closed else worst.excess > self.config.close
        self._run = self._run + 1 if against else 0
        needed = self.config.open_after if self.closed else self.config.close_after
        if self._run >= needed or (worst.excess == np.inf and not self.closed):
            self.closed, self._run = not self.closed, 0
        return worst

    @staticmethod
    def _excess(key: str, familiar: Familiar, obs: Mapping[str, NDArray[Any]]) -> Finding:
        value = np.asarray(obs.get(key, np.nan), np.float64)
        if value.shape[-1:] != familiar.low.shape or not np.isfinite(value).all():
            return Finding(key, np.nan, np.nan, np.inf)
        value = value.reshape(-1, len(familiar.low))
        width = np.maximum(familiar.high - familiar.low, LEAST_RANGE)
        excess = np.maximum(familiar.low - value, value - familiar.high) / width
        row, column = np.unravel_index(int(np.argmax(excess)), excess.shape)
        worst = float(value[row, column])
        limit = float(np.clip(worst, familiar.low[column], familiar.high[column]))
        return Finding(f"{key}[{column}]", worst, limit, max(0.0, float(excess[row, column])))


RESPONSES = ("hold", "slow", "refuse")


@dataclass(frozen=True)
class SupportCheckConfig(Ranged):
    """What is done about actions without support."""

    response: str = (
        "hold"  # hold (play them until too many come in a row) | slow (go a share of the way) | refuse (none)
    )
    share: InnerShare = 0.3  # of the way that `slow` goes
    patience: Count = 3  # actions without support in a row after which the robot is held, whatever the response

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.response not in RESPONSES:
            raise unknown_name("response", self.response, RESPONSES)


class Support(NamedTuple):
    """What the check says about one action."""

    share: float  # of the way to go: 1 is all of it
    held: bool  # the robot has to be held
    score: float  # log-density, or minus a distance
    threshold: float  # least score that has support


class SupportCheck:
    """Judges actions one by one; remembers how many in a row had no support, also while the robot is held."""

    def __init__(self, gate: SupportGate, config: SupportCheckConfig | None = None) -> None:
        self.gate, self.config = gate, config or SupportCheckConfig()
        self._run = 0

    def judge(self, obs: Mapping[str, NDArray[Any]], action: NDArray[Any]) -> Support:
        """Judge an action `(A,)` in what was observed last, `{key: (...)}`.

        Raises:
            UserError: They are not those of the data.
        """
        shown = {key: torch.from_numpy(np.asarray(obs[key], np.float32))[None] for key in self.gate.keys if key in obs}
        point = self.gate.point(shown, torch.from_numpy(np.asarray(action, np.float32))[None])
        score, threshold = float(self.gate.score(point)), self.gate.threshold
        if score >= threshold:
            self._run = 0
            return Support(1.0, False, score, threshold)
        self._run += 1
        share = {"hold": 1.0, "slow": self.config.share, "refuse": 0.0}[self.config.response]
        return Support(share, self._run >= self.config.patience, score, threshold)
