"""Stages and starts that know the structure of long episodes: repeated observations, shared steps, subgoals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import Stage
from robopolicy.core.advantages.starts import along_time
from robopolicy.core.advantages.timeline import Units
from robopolicy.core.decisions import Decisions, by_group, by_trajectory, pair
from robopolicy.core.segments import Segments
from robopolicy.limits import Natural, NotNegative, Share


@dataclass(frozen=True)
class HistoryGroups:
    """Compare steps of a group that saw the same last observations, at several lengths of history (HGPO, S023).

    Ids of observations are `extra["observation"]` (N, T) int, read at the first decision of each unit. The discounted
    return of a step is centred within its cluster at each history length from 1 to `longest + 1`. With `base` the
    advantage so far, that of the episode, counts as length 0; else it is dropped. The result is the mean over the
    lengths at which there is an advantage at all, weighted by `(length + 1) ** power`.
    """

    centres: ClassVar[bool] = True
    longest: Natural = 2  # K; 0 is the step term of GiGPO
    gamma: Share = 0.95  # per unit
    power: float = 1.0
    base: bool = True
    standardise: bool = False  # divide by the population standard deviation of the cluster
    eps: NotNegative = 1e-6

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Step advantages `(N, T)`."""
        units = Units(decisions)
        reward = decisions.need("reward")
        gamma = (self.gamma, self.gamma)
        returns = units.at(along_time(decisions, reward, torch.zeros_like(reward), gamma, (1.0, 1.0), "unit"))
        seen = units.at(decisions.need_extra("observation").expand(decisions.shape).long())
        group = units.at(by_group(decisions).expand(decisions.shape).long())
        cluster, exists = group, units.valid
        total = units.at(advantage.expand(decisions.shape)) if self.base else torch.zeros_like(returns)
        weights = (total != 0).to(returns.dtype)
        for length in range(1, self.longest + 2):
            cluster = _dense(pair(cluster, seen))
            segments = Segments(cluster, exists)
            company = exists & (segments.spread(segments.count) > 1.5)
            centred = returns - segments.spread(segments.mean(returns))
            if self.standardise:
                centred = centred / (segments.spread(segments.std(returns, unbiased=False)) + self.eps)
            weight = (length + 1.0) ** self.power * (company & (centred != 0)).to(returns.dtype)
            total, weights = total + weight * centred, weights + weight
            seen = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1)  # the observation before
            exists = torch.cat([torch.zeros_like(exists[:, :1]), exists[:, :-1]], 1) & units.valid
        return units.spread(total / torch.where(weights > 0, weights, 1.0))


@dataclass(frozen=True)
class SharedSteps:
    """Give steps that several rollouts of a group have in common the mean of their advantages (SALT, S169).

    A step is an observation and what was done: `extra["observation"]` and `extra["action"]` (N, T) int, read at the
    first decision of each unit. What winners and losers share gets little credit, where they part keeps its own.
    """

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Advantages `(N, T)`."""
        units = Units(decisions)
        observation, action = (
            units.at(decisions.need_extra(name).expand(decisions.shape).long()) for name in ("observation", "action")
        )
        group, trajectory = (
            units.at(ids.expand(decisions.shape).long()) for ids in (by_group(decisions), by_trajectory(decisions))
        )
        own = units.at(advantage.expand(decisions.shape))
        step = _dense(pair(_dense(pair(group, observation)), action))
        again = Segments(pair(step, trajectory), units.valid)  # a rollout counts once, however often it took the step
        share = units.valid.to(own.dtype) / again.spread(again.count.clamp(min=1)).to(own.dtype)
        segments = Segments(step, share)
        return units.spread(segments.spread(segments.mean(own)))


@dataclass(frozen=True)
class Subgoals:
    """Advantages on two levels: one for choosing subgoals, one for acting on them (HiPER, S159).

    A unit with `extra["switch"]` (N, T) true at its first decision begins a subgoal; the first unit always does. Above,
    an estimate over segments of d units: reward of the segment, discount `gamma ** d`, trace `gamma ** d * lam`, on
    `extra["high_value"]` (N, T), or on `Decisions.value` where one critic serves both levels. Below, one inside each
    segment on `Decisions.value`, which bootstraps at its end from the high value of the next. `extra["subgoal"]` (N, T)
    true marks the decisions that get the upper one.
    """

    gamma: Share = 0.99
    lam: Share = 0.95

    def __call__(self, decisions: Decisions) -> Tensor:
        """Advantages `(N, T)`."""
        units = Units(decisions)
        above, below, _ = self._levels(decisions, units)
        chosen = decisions.need_extra("subgoal").bool()
        return torch.where(chosen, units.spread(above), units.spread(below))

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Lambda returns of the one value: of the level above where a subgoal begins, else of the one below."""
        units = Units(decisions)
        above, below, begins = self._levels(decisions, units)
        value = units.at(decisions.need("value"))
        return units.spread(value + torch.where(begins, above, below)), units.beginnings()

    def _levels(self, decisions: Decisions, units: Units) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages on both levels, and where subgoals begin, `(S, U)`."""
        reward, low = units.sums(decisions.need("reward")), units.at(decisions.need("value"))
        high = units.at(decisions.extra.get("high_value", decisions.need("value")))
        begins = units.at(decisions.need_extra("switch").bool()) | (torch.arange(units.count, device=low.device) == 0)
        zero = torch.zeros_like(low[:, 0])
        next_high, next_low, ahead, behind = zero, zero, zero, zero
        segment, next_begins = zero, torch.ones_like(begins[:, 0])
        discount = torch.ones_like(zero)
        above, below = torch.zeros_like(low), torch.zeros_like(low)
        for u in reversed(range(units.count)):
            now = units.valid[:, u]
            # below: the trace ends with the segment, whose end bootstraps from the level above
            bootstrap = torch.where(next_begins, next_high, next_low)
            inside = torch.where(next_begins, 0.0, behind)
            step = reward[:, u] + self.gamma * bootstrap - low[:, u] + self.gamma * self.lam * inside
            behind = torch.where(now, step, behind)
            below[:, u] = behind
            # above: reward and discount gathered since the end of the segment
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


STRUCTURE: dict[str, Callable[..., Stage]] = {"history_groups": HistoryGroups, "shared_steps": SharedSteps}


def _dense(ids: Tensor) -> Tensor:
    """Small ids in the same order, so that pairs of pairs do not overflow."""
    return torch.searchsorted(torch.sort(ids.flatten())[0], ids.contiguous())
