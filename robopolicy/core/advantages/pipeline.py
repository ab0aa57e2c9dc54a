"""Composition of advantage stages, and the scope of their statistics.

Group-relative policy optimisation, for instance, is
`Pipeline([Baseline("mean", Scope(by_group)), Scale(Scope(by_group))])(outcome(decisions), decisions)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from robopolicy.core.decisions import Decisions, Partition, by_trajectory, pair
from robopolicy.core.segments import Segments
from robopolicy.limits import Natural


class Stage(Protocol):
    """One step of the pipeline. The advantage is `(N, 1)` per row or `(N, T)` per decision, in and out."""

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Transform the advantage."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A stage with memory that belongs into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides future calls."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A stage that learns from a batch once its update is over, such as a tracker."""

    def observe(self, decisions: Decisions) -> None:
        """Take note of the batch."""
        ...


@dataclass(frozen=True)
class Scope:
    """Over which entries a statistic is taken. Methods differ here silently, so it is always written out.

    An `(N, 1)` advantage counts each row once, an `(N, T)` advantage each valid decision.
    """

    partition: Partition  # entries with equal ids share a statistic
    per: Partition | None = None  # these count once each, e.g. `by_trajectory` where long ones have more rows
    source: Natural | None = None  # only rows of this source enter (teacher or replayed rows then merely read)

    def segments(self, advantage: Tensor, decisions: Decisions) -> Segments:
        """Group the entries of an advantage."""
        ids = self.partition(decisions)
        if ids.shape[1] > advantage.shape[1]:
            raise ValueError("This partition tells decisions of a row apart; broadcast the advantage to (N, T) first.")
        enters = valid_entries(advantage, decisions)
        if self.source is not None:
            enters = enters & (decisions.need("source") == self.source).unsqueeze(1)
        if self.per is None:
            return Segments(ids, enters)
        alike = Segments(pair(ids, self.per(decisions)), enters)
        share = enters.to(advantage.dtype) / alike.spread(alike.count.clamp(min=1)).to(advantage.dtype)
        return Segments(ids, share)


class Pipeline:
    """Stages applied left to right; itself a stage."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Compose `stages`.

        Raises:
            ValueError: When a centring stage follows one that promises to keep the sign of the advantage.
        """
        self.stages = list(stages)
        promised = False
        for stage in self.stages:
            if promised and getattr(stage, "centres", False):
                raise ValueError("A baseline after sign-keeping shaping breaks its promise; put the baseline first.")
            promised = promised or getattr(stage, "fraction", None) is not None

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Apply all stages to `(N,)`, `(N, 1)` or `(N, T)`."""
        if advantage.dim() == 1:
            advantage = advantage.unsqueeze(1)
        for stage in self.stages:
            advantage = stage(advantage, decisions)
        return advantage

    def observe(self, decisions: Decisions) -> None:
        """Let the stages that track something see the batch; call it once, after the update."""
        for stage in self.stages:
            if isinstance(stage, Observer):
                stage.observe(decisions)

    def state_dict(self) -> dict[str, Any]:
        """State of the stages that have memory, by position."""
        return {str(i): stage.state_dict() for i, stage in enumerate(self.stages) if isinstance(stage, Stateful)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for i, stage in enumerate(self.stages):
            if isinstance(stage, Stateful):
                stage.load_state_dict(state[str(i)])


def outcome(decisions: Decisions) -> Tensor:
    """Total reward of each row's trajectory `(N, 1)`, where group-relative methods start."""
    reward = decisions.need("reward")
    segments = Segments(by_trajectory(decisions), decisions.valid())
    return segments.spread(segments.sum(reward))[:, :1]


def valid_entries(advantage: Tensor, decisions: Decisions) -> Tensor:
    """Bool in the shape of the advantage: decisions, or rows with at least one decision."""
    valid = decisions.valid()
    return valid if advantage.shape == valid.shape else valid.any(1, keepdim=True)
