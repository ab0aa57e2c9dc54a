"""Advantage sources of single methods: recorded values, unit rewards, values of windows and of subgoals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction
from robopolicy.core.advantage_sources import UnitView
from robopolicy.core.decisions import Decisions
from robopolicy.core.returns import sequence_gae


def precomputed(decisions: Decisions, *, key: str) -> Tensor:
    """Return a recorded advantage, `extra[key]` (N,) or (N, T)."""
    return decisions.require_extra(key, per_decision=True)


def unit_reward(decisions: Decisions) -> Tensor:
    """Return the reward of each decision's unit `(N, T)`; other turns or chunks get no credit."""
    units = UnitView(decisions)
    return units.broadcast(units.sums(decisions.require("reward")))


@dataclass(frozen=True)
class WindowGae:
    """GAE in which truncated rows continue unchanged: V(next) = V(last) at the truncation (T-PPO, Fan et al. 2025).

    Needs `value`, and `extra["finished"]` (N,) bool; finished rows have the ordinary GAE.
    """

    gamma: Fraction = 1.0
    lam: Fraction = 1.0

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute advantages `(N, T)`."""
        value, valid = decisions.require("value"), decisions.valid()
        finished = decisions.require_extra("finished")
        last = value.gather(1, _last(valid)).squeeze(1)
        bootstrap = last.masked_fill(finished.bool(), 0.0)
        advantage, _ = sequence_gae(decisions.require("reward"), value, self.gamma, self.lam, valid, bootstrap)
        return advantage

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Compute the lambda returns of finished rows."""
        finished = decisions.require_extra("finished", per_decision=True).bool()
        return self(decisions) + decisions.require("value"), decisions.valid() & finished


def _last(valid: Tensor) -> Tensor:
    """Return the column `(N, 1)` of the last decision of each row, 0 if there is none."""
    columns = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
    return columns.masked_fill(~valid, 0).amax(1, keepdim=True)


@dataclass(frozen=True)
class Subgoals:
    """Advantages on two levels: choice of subgoals and actions towards them (HiPER, Peng et al. 2026).

    A unit with `extra["switch"]` (N, T) true at its first decision starts a subgoal; the first unit always does. The
    high level is GAE over segments of d units: reward of the segment, discount `gamma ** d`, trace `gamma ** d * lam`,
    with `extra["high_value"]` (N, T), or `Decisions.value` if one critic serves both levels. The low level is GAE
    inside each segment with `Decisions.value`, bootstrapped at its end from the high value of the next segment.
    Decisions with `extra["subgoal"]` (N, T) get the high-level advantage.
    """

    gamma: Fraction = 0.99
    lam: Fraction = 0.95

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute advantages `(N, T)`."""
        units = UnitView(decisions)
        above, below, _ = self._levels(decisions, units)
        chosen = decisions.require_extra("subgoal").bool()
        return torch.where(chosen, units.broadcast(above), units.broadcast(below))

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Compute lambda returns of a shared value: of the high level where a subgoal starts, else of the low level."""
        units = UnitView(decisions)
        above, below, begins = self._levels(decisions, units)
        value = units.gather(decisions.require("value"))
        return units.broadcast(value + torch.where(begins, above, below)), units.first_mask()

    def _levels(self, decisions: Decisions, units: UnitView) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the advantages of both levels and the starts of subgoals, `(S, U)`."""
        reward, low = units.sums(decisions.require("reward")), units.gather(decisions.require("value"))
        high = units.gather(decisions.extra.get("high_value", decisions.require("value")))
        begins = units.gather(decisions.require_extra("switch").bool()) | (
            torch.arange(units.count, device=low.device) == 0
        )
        zero = torch.zeros_like(low[:, 0])
        next_high, next_low, ahead, behind = zero, zero, zero, zero
        segment, next_begins = zero, torch.ones_like(begins[:, 0])
        discount = torch.ones_like(zero)
        above, below = torch.zeros_like(low), torch.zeros_like(low)
        for u in reversed(range(units.count)):
            now = units.valid[:, u]
            # low level: the trace ends with the segment, which bootstraps from the high level
            bootstrap = torch.where(next_begins, next_high, next_low)
            inside = torch.where(next_begins, 0.0, behind)
            step = reward[:, u] + self.gamma * bootstrap - low[:, u] + self.gamma * self.lam * inside
            behind = torch.where(now, step, behind)
            below[:, u] = behind
            # high level: reward and discount accumulated from the end of the segment
            segment = torch.where(now, reward[:, u] + self.gamma * torch.where(next_begins, 0.0, segment), segment)
            discount = torch.where(now, self.gamma * torch.where(next_begins, 1.0, discount), discount)
            starts = now & begins[:, u]
            leap = segment + discount * next_high - high[:, u] + discount * self.lam * ahead
            ahead = torch.where(starts, leap, ahead)
            above[:, u] = ahead
            next_high = torch.where(starts, high[:, u], next_high)
            next_low = torch.where(now, low[:, u], next_low)
            next_begins = torch.where(now, begins[:, u], next_begins)
        return above, below, begins
