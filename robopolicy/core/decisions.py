"""Decisions, the batch of the core, and partitions into sets that are compared with each other.

A *decision* is the smallest choice with a log-probability: an action, one denoising step, one token. Decisions nest:
decision < unit (chunk or turn) < trajectory < group (same start state or prompt) < domain. A denoising chain
`(T_env, N_env, K)` becomes rows of K decisions, one row per chunk; a token batch `(B, T)` has one row per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.plugins import Registry

PER_DECISION = ("logp_old", "logp_behaviour", "logp_ref", "mask", "reward", "value", "entropy", "unit", "depth")
PER_ROW = ("group", "trajectory", "domain", "source", "version")
FIELDS = (*PER_DECISION, *PER_ROW)


class MissingField(ValueError):
    """The batch lacks a field that a part needs."""


@dataclass(frozen=True)
class Decisions:
    """N rows of T decisions. All fields except `logp_old` are optional; a part that needs a missing field raises.

    Minibatches consist of rows. A row is a trajectory in a token batch and one chunk in a denoising chain.
    """

    logp_old: Tensor  # (N, T) log-probability at the start of the update, the denominator of the ratio [nats]
    logp_behaviour: Tensor | None = None  # (N, T) under the sampler that acted
    logp_ref: Tensor | None = None  # (N, T) under the reference policy
    mask: Tensor | None = None  # (N, T) bool, True where the policy decided; None: all True
    reward: Tensor | None = None  # (N, T)
    value: Tensor | None = None  # (N, T) critic before the update
    entropy: Tensor | None = None  # (N, T) at sampling time
    unit: Tensor | None = None  # (N, T) int, chunk or turn within the trajectory; None: the row
    depth: Tensor | None = None  # (N, T) int, denoising step or turn, for schedules; None: the column index
    group: Tensor | None = None  # (N,) int, same start state or prompt
    trajectory: Tensor | None = None  # (N,) int; None: one per row
    domain: Tensor | None = None  # (N,) int, task or data domain
    source: Tensor | None = None  # (N,) int, 0 drawn from the current policy, other values as set by the intervention
    version: Tensor | None = None  # (N,) int, weights that drew the row
    extra: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (N, ...) further data

    def __post_init__(self) -> None:
        if self.logp_old.dim() != 2:
            raise ValueError(f"logp_old must be (N, T), got shape {tuple(self.logp_old.shape)}.")
        shape = self.logp_old.shape
        for name, value in self._present():
            expected = shape if name in PER_DECISION else shape[:1]
            if value.shape != expected:
                raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(value.shape)}.")
        for name, value in self.extra.items():
            if value.shape[:1] != shape[:1]:
                raise ValueError(f"extra['{name}'] must have {shape[0]} rows, got shape {tuple(value.shape)}.")

    def __len__(self) -> int:
        return int(self.logp_old.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(N, T)."""
        return int(self.logp_old.shape[0]), int(self.logp_old.shape[1])

    def select(self, rows: Tensor | slice) -> Decisions:
        """Select rows by index, bool mask or slice, e.g. a minibatch."""
        picked: dict[str, Any] = {name: value[rows] for name, value in self._present()}
        return Decisions(**picked, extra={name: value[rows] for name, value in self.extra.items()})

    def with_fields(self, **changes: Any) -> Decisions:
        """Copy with some fields replaced."""
        return replace(self, **changes)

    def require(self, name: str) -> Tensor:
        """Return a field, or raise `MissingField`."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise MissingField(f"This part needs Decisions.{name}, which is missing.")
        return value

    def require_extra(self, name: str, per_decision: bool = False) -> Tensor:
        """Return an entry of `extra`, (N, ...), or raise `MissingField`; `per_decision` turns (N,) into (N, 1)."""
        if name not in self.extra:
            raise MissingField(f"This part needs Decisions.extra['{name}'], which is missing.")
        value = self.extra[name]
        return value.unsqueeze(1) if per_decision and value.dim() == 1 else value

    def valid(self) -> Tensor:
        """The mask, bool (N, T)."""
        return torch.ones_like(self.logp_old, dtype=torch.bool) if self.mask is None else self.mask.bool()

    def depths(self) -> Tensor:
        """The depth, int (N, T)."""
        if self.depth is not None:
            return self.depth
        return torch.arange(self.shape[1], device=self.logp_old.device).expand(self.shape)

    def _present(self) -> list[tuple[str, Tensor]]:
        """Fields that are set."""
        own = vars(self)
        return [(name, own[name]) for name in FIELDS if own[name] is not None]


def row_numbers(decisions: Decisions) -> Tensor:
    """Number (N,) of each row within its trajectory; the rows of a trajectory are in order of time."""
    rows = torch.arange(len(decisions), device=decisions.logp_old.device)
    if decisions.trajectory is None:
        return torch.zeros_like(rows)
    order = torch.argsort(decisions.trajectory, stable=True)
    ordered = decisions.trajectory[order]
    starts = torch.searchsorted(ordered, ordered)  # first index of each row's trajectory
    return torch.empty_like(rows).scatter_(0, order, rows - starts)


def first_rows(decisions: Decisions) -> Tensor:
    """Index (S,) of the first row of each trajectory, in order of the rows."""
    return torch.nonzero(row_numbers(decisions) == 0).squeeze(1)


def counted_rows(decisions: Decisions) -> Tensor:
    """Index (S,) of the first row of each trajectory with a valid decision: masked trajectories have no outcome."""
    first, trajectory = first_rows(decisions), by_trajectory(decisions).squeeze(1)
    return first[torch.isin(trajectory[first], trajectory[decisions.valid().any(1)])]


def per_row(values: Tensor, decisions: Decisions) -> Tensor:
    """One value per trajectory, in order of `first_rows` (S,), at each of its rows `(N, 1)`."""
    keys = by_trajectory(decisions).squeeze(1)
    names = keys[first_rows(decisions)]
    order = torch.argsort(names)
    return values[order[torch.searchsorted(names[order], keys)]].unsqueeze(1)


def unit_numbers(decisions: Decisions) -> Tensor:
    """Number (N, T) of each decision's unit (chunk, turn) within its trajectory; the row number if `unit` is None."""
    if decisions.unit is not None:
        return decisions.unit
    return row_numbers(decisions).unsqueeze(1).expand(decisions.shape)


Partition = Callable[[Decisions], Tensor]
"""A map from a batch to int ids `(N, 1)` or `(N, T)`; entries with equal ids form a set."""


def by_batch(decisions: Decisions) -> Tensor:
    """One set: the whole batch."""
    return torch.zeros(len(decisions), 1, dtype=torch.long, device=decisions.logp_old.device)


def by_group(decisions: Decisions) -> Tensor:
    """Rows that started from the same state or prompt."""
    return decisions.require("group").unsqueeze(1)


def by_group_depth(decisions: Decisions) -> Tensor:
    """Entries of one group at the same depth."""
    return pair(by_group(decisions), decisions.depths())


def by_trajectory(decisions: Decisions) -> Tensor:
    """Rows of one trajectory."""
    if decisions.trajectory is not None:
        return decisions.trajectory.unsqueeze(1)
    return torch.arange(len(decisions), device=decisions.logp_old.device).unsqueeze(1)


def by_unit(decisions: Decisions) -> Tensor:
    """Decisions of one unit (chunk or turn)."""
    if decisions.unit is None:
        return torch.arange(len(decisions), device=decisions.logp_old.device).unsqueeze(1)
    return pair(by_trajectory(decisions), decisions.unit)


PARTITIONS: Registry[Callable[..., Tensor]] = Registry(
    "parts.partition", {"all": by_batch, "group": by_group, "trajectory": by_trajectory, "unit": by_unit}
)


def pair(first: Tensor, second: Tensor) -> Tensor:
    """A unique id for each pair of ids, in their broadcast shape."""
    low = second.min()
    return first * (second.max() - low + 1) + (second - low)
