"""Is the action one that the data supports in this state? If not, the policy is guessing (OGSRL's guardian, S127)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.data.support import SupportGate
from robopolicy.errors import unknown_name
from robopolicy.limits import Count, InnerShare, Ranged

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
