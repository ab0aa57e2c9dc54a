"""The stages: baselines, scales, modulation, shaping, mixing, broadcasting, clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import Pipeline, Scope, Stage, outcome, valid_entries
from robopolicy.core.advantages.trackers import Tracker
from robopolicy.core.decisions import Decisions, Partition, by_group, first_rows
from robopolicy.core.segments import Segments
from robopolicy.limits import NotNegative, Positive


@dataclass(frozen=True)
class Baseline:
    """Subtract the mean, the leave-one-out mean or the median of those an entry is compared with."""

    centres: ClassVar[bool] = True
    kind: str  # "mean" | "leave_one_out" | "median"
    scope: Scope
    lone: str = "raw"  # what an entry without company gets: "raw" itself (no baseline) or "zero"

    def __post_init__(self) -> None:
        if self.kind not in ("mean", "leave_one_out", "median"):
            raise ValueError(f"Baseline kind must be 'mean', 'leave_one_out' or 'median', got {self.kind!r}.")
        if self.lone not in ("raw", "zero"):
            raise ValueError(f"Baseline lone must be 'raw' or 'zero', got {self.lone!r}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        segments = self.scope.segments(advantage, decisions)
        if self.kind == "leave_one_out":
            baseline = segments.leave_one_out(advantage)
        else:
            statistic = segments.mean(advantage) if self.kind == "mean" else segments.median(advantage)
            baseline = segments.spread(statistic)
        alone = segments.spread(segments.count) < 1.5
        alone = alone & segments.enters  # an outsider (another source) has company in a set of one
        centred = torch.where(
            alone, advantage if self.lone == "raw" else torch.zeros_like(advantage), advantage - baseline
        )
        return centred.masked_fill(~valid_entries(advantage, decisions), 0.0)


@dataclass(frozen=True)
class GivenBaseline:
    """Subtract a recorded number, e.g. the reward of the greedy rollout (ReMax): `extra[key]`, (N,) or (N, T)."""

    centres: ClassVar[bool] = True
    key: str

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        return advantage - decisions.need_extra(self.key, per_decision=True)


@dataclass(frozen=True)
class TrackerBaseline:
    """Subtract a running estimate per group (single-stream methods: no second rollout is needed, S037).

    The tracker is read here and written by `observe`, after the update. With `half_life` it forgets the more, the
    further the policy has moved: the share `2 ** (-drift / half_life)`, within `keep`, stays, where the drift
    `extra["drift"]` (N,) is the mean |change of log-probability| on the group's last recorded rollout [nats].
    """

    centres: ClassVar[bool] = True
    tracker: Tracker
    per: Partition = by_group  # what has an estimate of its own; group ids must then mean the same in every batch
    half_life: Positive | None = None  # nats
    keep: tuple[float, float] = (0.875, 0.96)  # bounds of the share that stays

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        self._kept(decisions)  # what is missing is missed before the update, not after it
        return advantage - self.tracker.read(self.per(decisions)[:, 0]).to(advantage).unsqueeze(1)

    def observe(self, decisions: Decisions) -> None:
        """Write the outcome of each trajectory."""
        first, kept = first_rows(decisions), self._kept(decisions)
        keys, values = self.per(decisions)[first, 0], outcome(decisions)[first, 0]
        self.tracker.write(keys, values, None if kept is None else kept[first])

    def _kept(self, decisions: Decisions) -> Tensor | None:
        """Share of the past that stays at each row `(N,)`."""
        if self.half_life is None:
            return None
        return torch.exp2(-decisions.need_extra("drift") / self.half_life).clamp(self.keep[0], self.keep[1])

    def state_dict(self) -> dict[str, Any]:
        """State of the tracker."""
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.tracker.load_state_dict(state)


@dataclass(frozen=True)
class Scale:
    """Divide by the standard deviation of the scope plus `eps`; sets of one are left as they are."""

    scope: Scope
    unbiased: bool = True  # False: population standard deviation
    eps: NotNegative = 1e-6
    of: str = "advantage"  # what deviates: "advantage" | "outcome", before any baseline

    def __post_init__(self) -> None:
        if self.of not in ("advantage", "outcome"):
            raise ValueError(f"Scale of must be 'advantage' or 'outcome', got {self.of!r}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        values = outcome(decisions) if self.of == "outcome" else advantage
        segments = self.scope.segments(values, decisions)
        deviation = segments.spread(segments.std(values, unbiased=self.unbiased))
        return (advantage / (deviation + self.eps)).masked_fill(~valid_entries(advantage, decisions), 0.0)


@dataclass(frozen=True)
class ConstantScale:
    """Divide by a fixed number."""

    divisor: Positive

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        return advantage / self.divisor


@dataclass(frozen=True)
class Mix:
    """Weighted sum of branches that all start from the same advantage."""

    branches: Sequence[Pipeline]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.branches) != len(self.weights) or not self.branches:
            raise ValueError(f"Mix needs one weight per branch, got {len(self.weights)} for {len(self.branches)}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Mix the branches."""
        parts = [
            weight * branch(advantage, decisions) for branch, weight in zip(self.branches, self.weights, strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def observe(self, decisions: Decisions) -> None:
        """Hand on to the branches."""
        for branch in self.branches:
            branch.observe(decisions)

    def state_dict(self) -> dict[str, Any]:
        """State of the branches, by position."""
        return {str(i): branch.state_dict() for i, branch in enumerate(self.branches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for i, branch in enumerate(self.branches):
            branch.load_state_dict(state[str(i)])


@dataclass(frozen=True)
class Broadcast:
    """Give every decision the advantage of its row, or the sum or mean over its segment of a partition.

    With `by_unit` and "sum", an advantage placed on one decision of each turn or chunk reaches all of them (VL-DAC).
    """

    partition: Partition | None = None  # None: rows
    reduce: str = "sum"  # "sum" | "mean"

    def __post_init__(self) -> None:
        if self.reduce not in ("sum", "mean"):
            raise ValueError(f"Broadcast reduce must be 'sum' or 'mean', got {self.reduce!r}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Advantage `(N, T)`, 0 where the mask is off."""
        if self.partition is not None:
            if advantage.shape != decisions.logp_old.shape:
                raise ValueError("Broadcast over a partition needs an advantage per decision, (N, T).")
            segments = Segments(self.partition(decisions), decisions.valid())
            pooled = segments.sum(advantage) if self.reduce == "sum" else segments.mean(advantage)
            advantage = segments.spread(pooled)
        return advantage.expand(decisions.shape).masked_fill(~decisions.valid(), 0.0)


@dataclass(frozen=True)
class Indicator:
    """1 where the advantage is positive, else 0: imitate what went better than expected (DigiRL, S157)."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Zeros and ones."""
        return (advantage > 0).to(advantage.dtype)


@dataclass(frozen=True)
class Clip:
    """Clamp to [-limit, limit]."""

    limit: NotNegative

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Clip the advantage."""
        return advantage.clamp(-self.limit, self.limit)


STAGES: dict[str, Callable[..., Stage]] = {
    "baseline": Baseline,
    "given_baseline": GivenBaseline,
    "tracker_baseline": TrackerBaseline,
    "scale": Scale,
    "constant_scale": ConstantScale,
    "mix": Mix,
    "broadcast": Broadcast,
    "indicator": Indicator,
}
