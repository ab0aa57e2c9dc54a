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
    what the world gave step by step. `extra` fields `(n, L, ...)` are padded with zeros to the longest L. Attempts that
    do not tell `logp_behaviour` apart were drawn with their `logp_old`. `extra["finished"]` (N,) says which have ended.
    """
    return joined([_with_ids(attempt, number) for number, attempt in enumerate(attempts)])


def joined(parts: Sequence[Decisions]) -> Decisions:
    """Rows of all parts under each other, padded on the right and masked there; ids stay as they are."""
    longest = max(part.shape[1] for part in parts)
    widths: dict[str, int] = {}
    for part in parts:
        for name, value in part.extra.items():
            if value.dim() > 1:
                widths[name] = max(widths.get(name, 0), value.shape[1])
    return cat([_padded(part, longest, widths) for part in parts])


def _with_ids(attempt: Attempt, number: int) -> Decisions:
    """Rows of one attempt with its ids and its reward."""
    decisions, count = attempt.decisions, len(attempt.decisions)
    valid, reward = decisions.valid(), decisions.reward
    reward = torch.zeros_like(decisions.logp_old) if reward is None else reward.masked_fill(~valid, 0.0)
    places = valid.nonzero()
    if len(places):
        row, column = places[-1].tolist()
        reward[row, column] += attempt.reward - float(reward.sum())

    def same(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=decisions.logp_old.device)

    behaviour, finished = decisions.logp_behaviour, same(attempt.finished).bool()
    return decisions.with_fields(
        logp_behaviour=decisions.logp_old if behaviour is None else behaviour,
        reward=reward,
        group=same(attempt.task.key),
        trajectory=same(number),
        source=same(attempt.source),
        version=same(attempt.version),
        extra={**decisions.extra, "finished": finished},
    )


def _padded(decisions: Decisions, width: int, widths: Mapping[str, int]) -> Decisions:
    """Rows of `width` decisions, and extra fields of their widths, with zeros behind."""

    def wide(value: Tensor, columns: int) -> Tensor:
        return functional.pad(value, [0, 0] * (value.dim() - 2) + [0, columns - value.shape[1]])

    named = {name: getattr(decisions, name) for name in PER_DECISION} | {"mask": decisions.valid()}
    grown = {name: wide(value, width) for name, value in named.items() if value is not None}
    extra = {name: wide(value, widths[name]) if value.dim() > 1 else value for name, value in decisions.extra.items()}
    return replace(decisions, **grown, extra=extra)


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
