"""Advantage stages: baselines, scales, modulation, shaping, mixing, broadcasting, clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from robopolicy.core.decisions import Decisions, Partition, by_group, by_trajectory, counted_rows, pair
from robopolicy.core.segments import Segments
from robopolicy.core.trackers import Tracker


class Stage(Protocol):
    """A step of the pipeline: maps an advantage, `(N, 1)` per row or `(N, T)` per decision, to a new one."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Transform the advantage."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A stage with state that checkpoints store."""

    def state_dict(self) -> dict[str, Any]:
        """State that determines future calls."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        ...


@runtime_checkable
class BatchObserver(Protocol):
    """A stage that updates its estimates from a batch after the gradient steps, such as a tracker."""

    def observe(self, decisions: Decisions) -> None:
        """Update running estimates from the batch."""
        ...


@dataclass(frozen=True)
class Scope:
    """Entries over which a statistic is taken: rows of an `(N, 1)` advantage, valid decisions of `(N, T)`."""

    partition: Partition  # entries with equal ids share a statistic
    reduce_over: Partition | None = None  # each of these sets has total weight 1, e.g. `by_trajectory`
    source: NonNegativeInt | None = None  # only rows of this source enter; other rows still receive the statistic

    def segments(self, advantage: Tensor, decisions: Decisions) -> Segments:
        """Group the entries of an advantage."""
        ids = self.partition(decisions)
        if ids.shape[1] > advantage.shape[1]:
            raise ValueError("This partition separates decisions of a row; broadcast the advantage to (N, T) first.")
        enters = valid_entries(advantage, decisions)
        if self.source is not None:
            enters = enters & (decisions.require("source") == self.source).unsqueeze(1)
        if self.reduce_over is None:
            return Segments(ids, enters)
        units = Segments(pair(ids, self.reduce_over(decisions)), enters)
        return Segments(ids, enters.to(advantage.dtype) / units.broadcast(units.count.clamp(min=1)).to(advantage.dtype))


class Pipeline:
    """A sequence of stages, applied left to right; it is a stage itself."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Compose `stages`.

        Raises:
            ValueError: A centring stage follows a stage that guarantees to keep the sign of the advantage.
        """
        self.stages = list(stages)
        keeps_sign = False
        for stage in self.stages:
            if keeps_sign and getattr(stage, "centres", False):
                raise ValueError("A baseline must not follow a stage that keeps the sign; put the baseline first.")
            keeps_sign = keeps_sign or getattr(stage, "fraction", None) is not None

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Apply all stages to `(N,)`, `(N, 1)` or `(N, T)`."""
        if advantage.dim() == 1:
            advantage = advantage.unsqueeze(1)
        for stage in self.stages:
            advantage = stage(advantage, decisions)
        return advantage

    def observe(self, decisions: Decisions) -> None:
        """Update the running estimates of the stages, once after each update."""
        for stage in self.stages:
            if isinstance(stage, BatchObserver):
                stage.observe(decisions)

    def state_dict(self) -> dict[str, Any]:
        """State of the stateful stages, by position."""
        return {str(i): stage.state_dict() for i, stage in enumerate(self.stages) if isinstance(stage, Stateful)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for i, stage in enumerate(self.stages):
            if isinstance(stage, Stateful):
                stage.load_state_dict(state[str(i)])


def outcome(decisions: Decisions) -> Tensor:
    """Total reward of each row's trajectory `(N, 1)`, the input of group-relative advantages."""
    reward = decisions.require("reward")
    segments = Segments(by_trajectory(decisions), decisions.valid())
    return segments.broadcast(segments.sum(reward))[:, :1]


def valid_entries(advantage: Tensor, decisions: Decisions) -> Tensor:
    """Bool mask in the shape of the advantage: valid decisions, or rows with at least one."""
    valid = decisions.valid()
    return valid if advantage.shape == valid.shape else valid.any(1, keepdim=True)


@dataclass(frozen=True)
class Baseline:
    """Subtract the mean, the leave-one-out mean or the median of the entries of the same set."""

    centres: ClassVar[bool] = True
    kind: str  # "mean" | "leave_one_out" | "median"
    scope: Scope
    singleton: str = "raw"  # advantage in a set of one: "raw" (no baseline) or "zero"

    def __post_init__(self) -> None:
        if self.kind not in ("mean", "leave_one_out", "median"):
            raise ValueError(f"Baseline kind must be 'mean', 'leave_one_out' or 'median', got {self.kind!r}.")
        if self.singleton not in ("raw", "zero"):
            raise ValueError(f"Baseline singleton must be 'raw' or 'zero', got {self.singleton!r}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        segments = self.scope.segments(advantage, decisions)
        if self.kind == "leave_one_out":
            baseline = segments.leave_one_out(advantage)
        else:
            statistic = segments.mean(advantage) if self.kind == "mean" else segments.median(advantage)
            baseline = segments.broadcast(statistic)
        # For a row of another source, a set of one still contains another entry.
        is_singleton = segments.enters & (segments.broadcast(segments.count) < 1.5)
        singleton = advantage if self.singleton == "raw" else torch.zeros_like(advantage)
        centred = torch.where(is_singleton, singleton, advantage - baseline)
        return centred.masked_fill(~valid_entries(advantage, decisions), 0.0)


@dataclass(frozen=True)
class GivenBaseline:
    """Subtract a recorded baseline `extra[field]`, (N,) or (N, T), e.g. the reward of the greedy rollout (ReMax)."""

    centres: ClassVar[bool] = True
    field: str

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        return advantage - decisions.require_extra(self.field, per_decision=True)


@dataclass(frozen=True)
class TrackerBaseline:
    """Subtract a running estimate per group, so that one rollout per group suffices (Xu and Ding 2025).

    `observe` updates the tracker after the gradient steps. With `half_life` the past estimate is weighted by
    `2 ** (-drift / half_life)`, clamped to `keep`, where `extra["drift"]` (N,) is the mean absolute change of the
    log-probabilities of the group's last recorded rollout [nats].
    """

    centres: ClassVar[bool] = True
    tracker: Tracker
    partition: Partition = by_group  # one estimate per set; the ids must mean the same in every batch
    half_life: Positive | None = None  # nats
    keep: tuple[float, float] = (0.875, 0.96)  # bounds of the weight of the past estimate

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        self._past_weight(decisions)  # raises before the update if a field is missing
        return advantage - self.tracker.read(self.partition(decisions)[:, 0]).to(advantage).unsqueeze(1)

    def observe(self, decisions: Decisions) -> None:
        """Update the tracker with the outcome of each trajectory."""
        first, kept = counted_rows(decisions), self._past_weight(decisions)
        keys, values = self.partition(decisions)[first, 0], outcome(decisions)[first, 0]
        self.tracker.write(keys, values, None if kept is None else kept[first])

    def _past_weight(self, decisions: Decisions) -> Tensor | None:
        """Weight of the past estimate for each row `(N,)`; None for the tracker's own."""
        if self.half_life is None:
            return None
        return torch.exp2(-decisions.require_extra("drift") / self.half_life).clamp(self.keep[0], self.keep[1])

    def state_dict(self) -> dict[str, Any]:
        """State of the tracker."""
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.tracker.load_state_dict(state)


@dataclass(frozen=True)
class Scale:
    """Divide by the standard deviation of the scope plus `eps`; the deviation of a set of one counts as 1."""

    scope: Scope
    unbiased: bool = True  # False: population standard deviation
    eps: NonNegative = 1e-6
    of: str = "advantage"  # deviation of the "advantage", or of the "outcome" before any baseline

    def __post_init__(self) -> None:
        if self.of not in ("advantage", "outcome"):
            raise ValueError(f"Scale of must be 'advantage' or 'outcome', got {self.of!r}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        values = outcome(decisions) if self.of == "outcome" else advantage
        segments = self.scope.segments(values, decisions)
        deviation = segments.broadcast(segments.std(values, unbiased=self.unbiased))
        return (advantage / (deviation + self.eps)).masked_fill(~valid_entries(advantage, decisions), 0.0)


@dataclass(frozen=True)
class ConstantScale:
    """Divide by a constant."""

    divisor: Positive

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Scale the advantage."""
        return advantage / self.divisor


@dataclass(frozen=True)
class Mix:
    """Weighted sum of branches with the same input."""

    branches: Sequence[Pipeline]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.branches) != len(self.weights) or not self.branches:
            raise ValueError(f"Mix needs one weight per branch, got {len(self.weights)} for {len(self.branches)}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Mix the branches."""
        total = self.weights[0] * self.branches[0](advantage, decisions)
        for weight, branch in zip(self.weights[1:], self.branches[1:], strict=True):
            total = total + weight * branch(advantage, decisions)
        return total

    def observe(self, decisions: Decisions) -> None:
        """Update the branches."""
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
    """Assign to every decision the advantage of its row, or the sum or mean over its set of a partition.

    With `by_unit` and "sum", the advantage of one decision of a turn or chunk is assigned to all of them (VL-DAC).
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
            advantage = segments.broadcast(pooled)
        return advantage.expand(decisions.shape).masked_fill(~decisions.valid(), 0.0)


@dataclass(frozen=True)
class Indicator:
    """1 where the advantage is positive, else 0: imitate better-than-expected actions (DigiRL, Bai et al. 2024)."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Indicator in the shape of the advantage."""
        return (advantage > 0).to(advantage.dtype)


@dataclass(frozen=True)
class ClipAdvantage:
    """Clamp to [-limit, limit]."""

    limit: NonNegative

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


@dataclass(frozen=True)
class DepthDiscount:
    """Factor `gamma ** (steps - 1 - depth)`: less credit for earlier denoising steps (DPPO); 0 keeps the last step."""

    gamma: Fraction
    steps: PositiveInt  # trained denoising steps

    def __call__(self, decisions: Decisions) -> Tensor:
        """Factor `(N, T)`."""
        remaining = (self.steps - 1 - decisions.depths()).to(decisions.logp_old.dtype)
        return torch.pow(self.gamma, remaining)
