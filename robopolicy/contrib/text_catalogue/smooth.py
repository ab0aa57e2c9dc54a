"""Standardisation over all visits of a prompt or start state (SAS of DCPO, Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative
from robopolicy.core.advantage import Scope, outcome
from robopolicy.core.decisions import Decisions, by_group, by_trajectory
from robopolicy.core.trackers import integers

SCOPE = Scope(by_group, reduce_over=by_trajectory)


@dataclass(frozen=True)
class SmoothStandardize:
    """Standardise by the group and by all rollouts of its prompt so far, and keep the smaller mixture of both.

    On the i-th visit, the two standardised advantages are mixed (i - 1) : 1 and 1 : (i - 1), and the mixture of smaller
    size is kept. Groups of equal outcomes learn from the comparison with earlier visits. The first visit is GRPO. The
    input are outcomes; group ids must identify prompts across batches.
    """

    centres: ClassVar[bool] = True
    eps: NonNegative = 1e-6
    seen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # prompt -> visits, count, mean, squares (4,)

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Compute the advantage `(N, 1)` from outcomes `(N, 1)`."""
        now = _moments(advantage, decisions)
        total = _merged(self._before(decisions).to(advantage), now)
        visits = total[:, :1]
        new, whole = self._standardized(advantage, now), self._standardized(advantage, total)
        mostly_new, mostly_old = ((visits - 1) * new + whole) / visits, (new + (visits - 1) * whole) / visits
        return torch.where(mostly_new.abs() < mostly_old.abs(), mostly_new, mostly_old)

    def observe(self, decisions: Decisions) -> None:
        """Add the outcomes of the batch to the moments of their prompts."""
        reward = outcome(decisions)
        total = _merged(self._before(decisions).to(reward), _moments(reward, decisions)).double().cpu()
        self.seen.update(zip(integers(decisions.require("group")), total.unbind(0), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return prompts (M,) and moments (M, 4)."""
        moments = list(self.seen.values())
        return {
            "keys": torch.tensor(list(self.seen), dtype=torch.int64),
            "moments": torch.stack(moments) if moments else torch.zeros(0, 4, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.seen.clear()
        self.seen.update(zip(integers(state["keys"]), state["moments"].double().unbind(0), strict=True))

    def _before(self, decisions: Decisions) -> Tensor:
        """Return the moments (N, 4) of the earlier visits of each row's prompt."""
        nothing = torch.zeros(4, dtype=torch.float64)
        return torch.stack([self.seen.get(key, nothing) for key in integers(decisions.require("group"))])

    def _standardized(self, value: Tensor, moments: Tensor) -> Tensor:
        _, count, mean, squares = moments.unsqueeze(2).unbind(1)
        return (value - mean) / ((squares / (count - 1).clamp(min=1)).sqrt() + self.eps)


def _moments(value: Tensor, decisions: Decisions) -> Tensor:
    """Compute visits (1), count, mean and sum of squared deviations of the row's group, (N, 4)."""
    segments = SCOPE.segments(value, decisions)
    mean = segments.mean(value)
    squares = segments.sum((value - segments.broadcast(mean)) ** 2)
    moments = [torch.ones_like(mean), segments.count.to(mean), mean, squares]
    return torch.cat([segments.broadcast(moment) for moment in moments], 1)


def _merged(before: Tensor, now: Tensor) -> Tensor:
    """Merge moments (N, 4) (Chan et al.)."""
    visits, count, mean, squares = before.unbind(1)
    more_visits, more, new_mean, more_squares = now.unbind(1)
    total = count + more
    change, share = new_mean - mean, more / total.clamp(min=1)
    squares = squares + more_squares + change**2 * count * share
    return torch.stack([visits + more_visits, total, mean + change * share, squares], 1)
