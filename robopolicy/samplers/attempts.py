"""From attempts to rows: stacking, groups, and how attempts go into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.decisions import PER_DECISION, Decisions, cat
from robopolicy.samplers.protocols import Attempt, Task

PLAIN = ("reward", "source", "version", "finished")  # fields of an attempt that checkpoints keep as they are
TASK = tuple(item.name for item in fields(Task))


def stack(attempts: Sequence[Attempt]) -> Decisions:
    """One batch of the rows of all attempts, in order.

    Rows are padded on the right to the longest, masked there. Group is the key of the task, trajectory the number of
    the attempt; source and version are those of the attempt. The reward of an attempt sits on its last decision, beside
    what the world gave step by step. `extra` fields `(n, L, ...)` are padded with zeros to the longest L. Where some
    attempts tell `logp_behaviour` apart, that of the others is their `logp_old`.
    """
    longest = max(attempt.decisions.shape[1] for attempt in attempts)
    if any(attempt.decisions.logp_behaviour is not None for attempt in attempts):
        attempts = [_with_behaviour(attempt) for attempt in attempts]
    widths: dict[str, int] = {}
    for attempt in attempts:
        for name, value in attempt.decisions.extra.items():
            if value.dim() > 1:
                widths[name] = max(widths.get(name, 0), value.shape[1])
    return cat([_rows(attempt, number, longest, widths) for number, attempt in enumerate(attempts)])


def _with_behaviour(attempt: Attempt) -> Attempt:
    decisions = attempt.decisions
    if decisions.logp_behaviour is not None:
        return attempt
    return replace(attempt, decisions=decisions.with_fields(logp_behaviour=decisions.logp_old))


def _rows(attempt: Attempt, number: int, longest: int, widths: Mapping[str, int]) -> Decisions:
    """Padded rows of one attempt with its ids and rewards."""
    decisions, count = attempt.decisions, len(attempt.decisions)
    valid, reward = decisions.valid(), decisions.reward
    reward = torch.zeros_like(decisions.logp_old) if reward is None else reward.masked_fill(~valid, 0.0)
    places = valid.nonzero()
    if len(places):
        row, column = places[-1].tolist()
        reward[row, column] += attempt.reward - float(reward.sum())
    decisions = decisions.with_fields(reward=reward, mask=valid)
    extra = {
        name: _padded(value, widths[name]) if value.dim() > 1 else value for name, value in decisions.extra.items()
    }
    padded: dict[str, Any] = {}
    for name in PER_DECISION:
        value = getattr(decisions, name)
        if value is not None:
            padded[name] = _padded(value, longest)

    def same(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=decisions.logp_old.device)

    return replace(
        Decisions(**padded, domain=decisions.domain, extra=extra),
        group=same(attempt.task.key),
        trajectory=same(number),
        source=same(attempt.source),
        version=same(attempt.version),
    )


def _padded(value: Tensor, width: int) -> Tensor:
    """`(n, L, ...)` with zeros (False) behind, up to `width` columns."""
    return functional.pad(value, [0, 0] * (value.dim() - 2) + [0, width - value.shape[1]])


def groups_of(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """Attempts by the key of their task, in the order in which keys appear."""
    groups: dict[int, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.task.key, []).append(attempt)
    return list(groups.values())


def to_plain(attempt: Attempt) -> dict[str, Any]:
    """Tensors and plain values of an attempt; what the world recorded for itself is left out."""
    decisions = attempt.decisions
    kept = {item.name: getattr(decisions, item.name) for item in fields(Decisions) if item.name != "extra"}
    return {
        "task": {name: getattr(attempt.task, name) for name in TASK},
        "decisions": {name: value for name, value in kept.items() if value is not None},
        "extra": dict(decisions.extra),
        "metrics": dict(attempt.metrics),
        **{name: getattr(attempt, name) for name in PLAIN},
    }


def from_plain(state: Mapping[str, Any]) -> Attempt:
    """The attempt that `to_plain` took apart."""
    return Attempt(
        task=Task(**state["task"]),
        decisions=Decisions(**state["decisions"], extra=dict(state["extra"])),
        metrics=dict(state["metrics"]),
        **{name: state[name] for name in PLAIN},
    )
