"""Bonuses for `Shape`, added to the advantage of a row or decision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction
from robopolicy.contrib.text_catalogue.comparisons import lengths
from robopolicy.contrib.text_catalogue.factors import potential, scaled_unit_entropy
from robopolicy.core.advantage import outcome
from robopolicy.core.advantage_sources import TrajectoryView, UnitView, next_entries
from robopolicy.core.decisions import Decisions, by_group
from robopolicy.core.group_statistics import ROLLOUTS
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments


@dataclass(frozen=True)
class ReferencePenalty:
    """`-coef log(pi_old / pi_ref)` of the trajectory: the KL to the reference as part of the reward."""

    coef: float = 0.1

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the bonus `(N, 1)`."""
        return -self.coef * log_ratio(decisions.logp_old, decisions.require("logp_ref"), decisions, "sequence")[:, :1]


@dataclass(frozen=True)
class FutureClarity:
    """`scale * exp(-sharpness H)` of the next unit: a bonus for units before a confident step.

    Source: EMPG, Wang et al. 2025.
    """

    scale: float = 0.1
    sharpness: float = 1.0

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the bonus `(N, T)`, 0 in the last unit of a trajectory."""
        units = UnitView(decisions)
        clarity = units.gather(self.scale * torch.exp(-self.sharpness * scaled_unit_entropy(decisions)))
        return units.broadcast(next_entries(clarity.masked_fill(~units.valid, 0.0)))


@dataclass(frozen=True)
class PotentialGain:
    """`scale` times the change of the potential from a decision's unit to the next; see `potential`.

    Source: SPAE, Wu et al. 2026.
    """

    scale: float = 0.1

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the bonus `(N, T)`, which sums over units to the last potential minus the first."""
        units = UnitView(decisions)
        value = units.gather(potential(decisions))
        last = ~next_entries(units.valid)
        return units.broadcast(self.scale * (next_entries(value) - value).masked_fill(last, 0.0))


@dataclass(frozen=True)
class EarlyBonus:
    """`slope` times the delay of the first event of a success relative to its group, in mean lengths.

    Source: ASPO, Lin and Xu 2025.

    Positions are `extra[key]` (N,), negative without an event; only successes with the event get a bonus.
    """

    key: str = "first_event"
    slope: float = -2.0
    success: float = 0.5  # rewards above this are successes

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the bonus `(N, 1)`."""
        position = decisions.require_extra(self.key, per_decision=True).to(decisions.logp_old.dtype)
        chosen = (position >= 0) & (outcome(decisions) > self.success)
        rollouts = ROLLOUTS.segments(position, decisions)
        segments = Segments(by_group(decisions), rollouts.weight * chosen)
        length = rollouts.broadcast(rollouts.mean(lengths(decisions)))
        bonus = self.slope * (position - segments.broadcast(segments.mean(position))) / length
        return torch.where(chosen, bonus, 0.0)


@dataclass(frozen=True)
class NoveltyBonus:
    """`scale * (c(prompt) - c(rollout))`, with c for unlikely decisions (ProGRPO, Li et al. 2026).

    c is the geometric mean probability of the least likely decisions; `extra["prompt_confidence"]` (N,) is c of the
    prompt. Groups of equal rewards get no bonus.
    """

    scale: float = 0.3
    share: Fraction = 0.2  # of the decisions of a trajectory

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the bonus `(N, 1)`."""
        reward = outcome(decisions)
        groups = ROLLOUTS.segments(reward, decisions)
        mixed = groups.broadcast(groups.differs(reward))
        prompt = decisions.require_extra("prompt_confidence", per_decision=True)
        return torch.where(mixed, self.scale * (prompt - confidence(decisions, self.share)), 0.0)


@dataclass(frozen=True)
class PrefixGain:
    """Change of the value of the shared prefix: mean outcome of the rollouts with the same prefix.

    Source: TEMPO, Tran et al. 2025.

    `extra["chosen"]` (N, T) int is the sampled token; each rollout is one row.
    """

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the bonus `(N, T)`, 0 where no rollouts diverge."""
        reward = outcome(decisions)
        value = prefix_values(decisions, reward)
        rollouts = ROLLOUTS.segments(reward, decisions)
        root = rollouts.broadcast(rollouts.mean(reward))
        before = torch.cat([root, value[:, :-1]], 1)
        return (value - before).masked_fill(~decisions.valid(), 0.0)


def confidence(decisions: Decisions, share: float) -> Tensor:
    """Compute the geometric mean probability `(N, 1)` of the `share` least likely decisions of each trajectory."""
    line = TrajectoryView(decisions)
    logp = line.flatten(decisions.logp_old.masked_fill(~decisions.valid(), 0.0))
    order = torch.sort(logp.masked_fill(~line.valid, torch.inf), dim=1)[0]
    wanted = (line.valid.sum(1, keepdim=True) * share).ceil().clamp(min=1)
    chosen = torch.arange(order.shape[1], device=order.device) < wanted
    mean = order.masked_fill(~chosen | order.isinf(), 0.0).sum(1, keepdim=True) / wanted
    return line.unflatten(mean.exp().expand(line.shape))[:, :1]


def prefix_values(decisions: Decisions, value: Tensor) -> Tensor:
    """Average `value` (N, 1) over the rows of the group that agree up to and including each decision `(N, T)`."""
    tokens = decisions.require_extra("chosen")
    ids = by_group(decisions)
    columns: list[Tensor] = []
    for t in range(decisions.shape[1]):
        moved = decisions.valid()[:, t : t + 1]
        ids = _renumbered(torch.where(moved, 2 * _joined(ids, tokens[:, t : t + 1]), 2 * _renumbered(ids) + 1))
        segments = Segments(ids, torch.ones_like(ids, dtype=value.dtype))
        columns.append(segments.broadcast(segments.mean(value)))
    return torch.cat(columns, 1)


def _joined(ids: Tensor, tokens: Tensor) -> Tensor:
    return _renumbered(_renumbered(ids) * (tokens.max() - tokens.min() + 1) + tokens - tokens.min())


def _renumbered(ids: Tensor) -> Tensor:
    distinct = torch.sort(ids.flatten())[0]
    return torch.searchsorted(distinct, ids.contiguous())
