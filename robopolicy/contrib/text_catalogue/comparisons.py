"""Stages that compare rollouts with each other: pools, splits, success rates, shared steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, NonNegativeInt, Positive, PositiveInt
from robopolicy.contrib.text_catalogue.partitions import by_group_source
from robopolicy.core.advantage import Scope, outcome, valid_entries
from robopolicy.core.advantage_sources import UnitView
from robopolicy.core.decisions import Decisions, by_group, by_trajectory, counted_rows, first_rows, pair, per_row
from robopolicy.core.group_statistics import ROLLOUTS, dense_ids
from robopolicy.core.segments import Segments

LEAST_VARIANCE = 1e-4  # of success rates, if all groups of a batch are equal


@dataclass(frozen=True)
class Pool:
    """Replace each entry by the mean of its scope, e.g. a group by its success rate (Han et al. 2025)."""

    scope: Scope

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Pool the advantage."""
        segments = self.scope.segments(advantage, decisions)
        return segments.broadcast(segments.mean(advantage)).masked_fill(~valid_entries(advantage, decisions), 0.0)


@dataclass(frozen=True)
class BetaScale:
    """Divide by the density of a Beta distribution, fitted to the batch, at the success rate of the group.

    Source: BNPO, Xiao et al. 2025.

    Moments of the success rates give a and b of the distribution Beta(1 + a / 3, 1 + b / 3), whose parameters are at
    least 1. Both 1: no scaling; both 3/2: the population standard deviation, up to a factor. Use it after a mean
    baseline.
    """

    low: float = 0.0  # smallest reward
    high: float = 1.0  # largest reward
    cap: Positive = 1e6  # on the inverse density

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"'beta_scale' needs low < high, got {self.low} and {self.high}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        rate = (outcome(decisions).to(advantage.dtype) - self.low) / (self.high - self.low)
        segments = ROLLOUTS.segments(rate, decisions)
        rates = segments.mean(rate)[segments.count > 0].clamp(0.0, 1.0)  # (S,)
        alpha = beta = torch.ones((), dtype=rate.dtype, device=rate.device)
        if len(rates) > 1:
            mean = rates.mean()
            spread = mean * (1.0 - mean) / rates.var().clamp(min=LEAST_VARIANCE) - 1.0
            alpha, beta = (1.0 + spread * side / 3.0 for side in (mean, 1.0 - mean))
            alpha, beta = alpha.clamp(min=1.0), beta.clamp(min=1.0)
        own = segments.broadcast(segments.mean(rate)).clamp(0.0, 1.0)
        constant = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        density = torch.exp(constant + torch.xlogy(alpha - 1.0, own) + torch.xlogy(beta - 1.0, 1.0 - own))
        return advantage / (self.high - self.low) / density.clamp(min=1.0 / self.cap)


@dataclass(frozen=True)
class SplitBaseline:
    """Compare the halves of a group by a metric (CANON, Chen et al. 2025).

    Between the halves, a high row gets `R - alpha mean_low + beta`, a low row `alpha R - mean_high - beta`; within a
    half, every row gets R minus the mean of the half. A half without rollouts has the mean of the group.
    """

    centres: ClassVar[bool] = True
    metric: str = "entropy"  # mean entropy of a trajectory | length, its decisions | another: extra[metric] (N,)
    inter: float = 1.0  # weight of the comparison between the halves; 1 - inter: within them
    alpha: NonNegative = 1.0  # below 1 favours the high half
    beta: NonNegative = 0.0  # coefficient for advantages above 0

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage, (N, 1)."""
        high = upper_half(metric_of(decisions, self.metric), decisions)
        enters = valid_entries(advantage, decisions)
        share = ROLLOUTS.segments(advantage, decisions).weight
        every, upper, lower = (Segments(by_group(decisions), share * rows) for rows in (enters, high, ~high))
        mean = every.mean(advantage)
        mean_high, mean_low = (
            every.broadcast(torch.where(half.count > 0, half.mean(advantage), mean)) for half in (upper, lower)
        )
        between = torch.where(
            high, advantage - self.alpha * mean_low + self.beta, self.alpha * advantage - mean_high - self.beta
        )
        within = advantage - torch.where(high, mean_high, mean_low)
        return (self.inter * between + (1.0 - self.inter) * within).masked_fill(~enters, 0.0)


@dataclass(frozen=True)
class MinGroupSize:
    """Set the advantage to 0 in scopes of fewer than `least` entries (CM2, Zhang et al. 2026)."""

    scope: Scope
    least: NonNegativeInt = 5

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Mask the advantage."""
        segments = self.scope.segments(advantage, decisions)
        return advantage.masked_fill(segments.broadcast(segments.count) < self.least - 0.5, 0.0)


class ImprovementBaseline:
    """Train on the last batch again, weighted by the gain of its update (PIPO, Wang et al. 2026).

    Rows of source `replayed` come from the last batch. Their advantage, divided by its mean size in the group, is
    multiplied by the gain in mean reward: the mean reward of the other rows minus the mean of the last `window`
    batches, over their standard deviation. The gain is 0 before `window` batches; negative gains are multiplied by
    `loss_weight`.
    """

    def __init__(
        self,
        window: PositiveInt = 8,
        limit: NonNegative = 10.0,
        loss_weight: NonNegative = 0.0,
        replayed: NonNegativeInt = 1,
    ) -> None:
        self.window, self.limit, self.loss_weight, self.replayed = window, limit, loss_weight, replayed
        self.rewards: list[float] = []

    def gain(self, decisions: Decisions) -> float:
        """Compute the gain in mean reward, in standard deviations."""
        if len(self.rewards) < self.window:
            return 0.0
        past = torch.tensor(self.rewards, dtype=torch.float64)
        deviation = float(past.std(correction=0))
        return (self._mean_reward(decisions) - float(past.mean())) / (deviation if deviation > 1e-8 else 1.0)

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Replace the advantage of the replayed rows, (N, 1)."""
        again = (decisions.require("source") == self.replayed).unsqueeze(1)
        segments = Scope(by_group_source, reduce_over=by_trajectory).segments(advantage, decisions)
        size = segments.broadcast(segments.mean(advantage.abs())).clamp(min=1e-8)
        gain = self.gain(decisions)
        weighted = (advantage / size * gain).clamp(-self.limit, self.limit) * (1.0 if gain >= 0 else self.loss_weight)
        return torch.where(again, weighted, advantage)

    def observe(self, decisions: Decisions) -> None:
        """Store the mean reward of the new rows."""
        self.rewards = [*self.rewards, self._mean_reward(decisions)][-self.window :]

    def _mean_reward(self, decisions: Decisions) -> float:
        first = counted_rows(decisions)
        fresh = first[decisions.require("source")[first] != self.replayed]
        return float(outcome(decisions)[fresh].double().mean()) if len(fresh) else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the mean rewards of the last batches."""
        return {"rewards": list(self.rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.rewards = [float(reward) for reward in state["rewards"]]


def metric_of(decisions: Decisions, metric: str) -> Tensor:
    """Return a metric of the trajectory at each of its rows `(N, 1)`: entropy, length, or `extra[metric]`."""
    if metric in ("entropy", "length"):
        segments = Segments(by_trajectory(decisions), decisions.valid())
        if metric == "length":
            return segments.broadcast(segments.count)[:, :1].to(decisions.logp_old.dtype)
        return segments.broadcast(segments.mean(decisions.require("entropy")))[:, :1]
    return decisions.require_extra(metric, per_decision=True)[:, :1]


def upper_half(values: Tensor, decisions: Decisions) -> Tensor:
    """Return bool `(N, 1)`: upper half of the group; the later rollout wins ties, and an odd group rounds up."""
    first = first_rows(decisions)
    group = decisions.require("group")[first]
    order = torch.argsort(values[first, 0], stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # by group, then by value
    ordered = group[order]
    start = torch.searchsorted(ordered, ordered)
    count = torch.searchsorted(ordered, ordered, right=True) - start
    high = torch.arange(len(order), device=order.device) - start >= count // 2
    return per_row(torch.zeros_like(high).scatter(0, order, high), decisions)


def lengths(decisions: Decisions) -> Tensor:
    """Count the decisions of each row's trajectory `(N, 1)`."""
    return metric_of(decisions, "length")


@dataclass(frozen=True)
class SharedSteps:
    """Average the advantage of steps shared by several rollouts of a group (SALT, Li et al. 2025).

    A step is an observation and an action: `extra["observation"]` and `extra["action"]` (N, T) int at the first
    decision of each unit. Steps shared by successes and failures get little credit; other steps keep their advantage.
    """

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Compute advantages `(N, T)`."""
        units = UnitView(decisions)
        observation, action = (
            units.gather(decisions.require_extra(name).expand(decisions.shape).long())
            for name in ("observation", "action")
        )
        group, trajectory = (
            units.gather(ids.expand(decisions.shape).long()) for ids in (by_group(decisions), by_trajectory(decisions))
        )
        own = units.gather(advantage.expand(decisions.shape))
        step = dense_ids(pair(dense_ids(pair(group, observation)), action))
        again = Segments(pair(step, trajectory), units.valid)  # repeated steps of a rollout count once
        share = units.valid.to(own.dtype) / again.broadcast(again.count.clamp(min=1)).to(own.dtype)
        segments = Segments(step, share)
        return units.broadcast(segments.broadcast(segments.mean(own)))
