"""Conversion of trajectories: stacking into rows, grouping, and plain values for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from robopolicy.core.decisions import FIELDS, PER_DECISION, Decisions, MissingField
from robopolicy.text.rollouts.protocols import Task, Trajectory

PLAIN_FIELDS = ("reward", "source", "version", "finished")  # fields of a trajectory that checkpoints store unchanged
TASK = tuple(item.name for item in fields(Task))


def stack(trajectories: Sequence[Trajectory]) -> Decisions:
    """Stack the rows of all trajectories, in order.

    Rows are padded on the right to the longest row and masked there; `extra` fields `(n, L, ...)` are padded with zeros
    to the longest L. `group` is the key of the task, `trajectory` the index of the trajectory; `source` and `version`
    are copied from it. The last decision of a trajectory receives its reward minus the rewards of single decisions.
    `logp_behaviour` defaults to `logp_old`. `extra["finished"]` (N,) marks finished trajectories.
    """
    counts = torch.tensor([len(trajectory.decisions) for trajectory in trajectories])

    def of_rows(values: Sequence[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(counts).to(rows.logp_old.device)

    rows = _complete_rows([trajectory.decisions for trajectory in trajectories])
    trajectory = of_rows(range(len(trajectories)))
    rows = rows.with_fields(
        group=of_rows([trajectory.task.key for trajectory in trajectories]),
        trajectory=trajectory,
        source=of_rows([trajectory.source for trajectory in trajectories]),
        version=of_rows([trajectory.version for trajectory in trajectories]),
        extra={**rows.extra, "finished": of_rows([trajectory.finished for trajectory in trajectories]).bool()},
    )
    total = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    return rows.with_fields(reward=_with_remainder(rows.require("reward"), rows.valid(), trajectory, total))


def concat_rows(parts: Sequence[Decisions]) -> Decisions:
    """Concatenate the rows of all parts, padded on the right and masked there; ids are unchanged.

    Raises:
        MissingField: Some parts have a field or an extra entry that others lack.
    """
    longest = max(part.shape[1] for part in parts)
    named: dict[str, Tensor] = {}
    for name in FIELDS:
        values = [part.valid() if name == "mask" else getattr(part, name) for part in parts]
        if any(value is not None for value in values):
            if any(value is None for value in values):
                raise MissingField(f"Some trajectories have {name} and some do not.")
            named[name] = _padded(values, longest) if name in PER_DECISION else torch.cat(values)
    if uneven := {name for part in parts for name in part.extra.keys() ^ parts[0].extra.keys()}:
        raise MissingField(f"Some trajectories have extra['{min(uneven)}'] and some do not.")
    extra = {name: _padded([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Decisions(**named, extra=extra)


def _padded(values: Sequence[Tensor], width: int = 0) -> Tensor:
    """Concatenate `(n_i, ...)`, or `(n_i, L_i, ...)` padded with zeros to the longest L, at least `width`."""
    if values[0].dim() == 1:
        return torch.cat(list(values))
    width = max(width, max(value.shape[1] for value in values))
    if all(len(value) == 1 for value in values):
        widest = values[0].new_zeros(width, *values[0].shape[2:])
        return pad_sequence([*(value[0] for value in values), widest], batch_first=True)[:-1]
    whole = values[0].new_zeros(sum(map(len, values)), width, *values[0].shape[2:])
    start = 0
    for value in values:
        whole[start : start + len(value), : value.shape[1]] = value
        start += len(value)
    return whole


def _complete_rows(parts: Sequence[Decisions]) -> Decisions:
    """Concatenate parts and fill missing rewards and behavior log-probabilities."""
    present = {(part.reward is None, part.logp_behaviour is None) for part in parts}
    return _complete(concat_rows(parts)) if len(present) == 1 else concat_rows([_complete(part) for part in parts])


def _complete(decisions: Decisions) -> Decisions:
    if decisions.reward is not None and decisions.logp_behaviour is not None:
        return decisions
    reward, behaviour = decisions.reward, decisions.logp_behaviour
    return decisions.with_fields(
        reward=torch.zeros_like(decisions.logp_old) if reward is None else reward,
        logp_behaviour=decisions.logp_old if behaviour is None else behaviour,
    )


def _with_remainder(reward: Tensor, valid: Tensor, trajectory: Tensor, total: Tensor) -> Tensor:
    """Add the difference to `total` to the reward `(N, T)` of the last decision of each trajectory."""
    reward = reward.masked_fill(~valid, 0.0)
    index = torch.arange(valid.numel(), device=valid.device).view(valid.shape)
    last = torch.full((len(total),), -1, device=valid.device)
    last = last.scatter_reduce(0, trajectory, index.masked_fill(~valid, -1).amax(1), "amax")
    present = torch.zeros(len(total), dtype=torch.float64, device=valid.device)
    present.index_add_(0, trajectory, reward.double().sum(1))
    missing = (total.to(valid.device) - present)[last >= 0]
    return reward.double().flatten().index_add(0, last[last >= 0], missing).view(reward.shape).to(reward.dtype)


def group_by_task(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Group trajectories by the key of their task, in order of appearance."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.task.key, []).append(trajectory)
    return list(groups.values())


def to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """Convert a trajectory to tensors and plain values, without the record of the environment."""
    decisions = trajectory.decisions
    kept = {item.name: getattr(decisions, item.name) for item in fields(Decisions) if item.name != "extra"}
    return {
        "task": {name: getattr(trajectory.task, name) for name in TASK},
        "decisions": {name: value for name, value in kept.items() if value is not None},
        "extra": dict(decisions.extra),
        "metrics": dict(trajectory.metrics),
        **{name: getattr(trajectory, name) for name in PLAIN_FIELDS},
    }


def from_dict(state: Mapping[str, Any]) -> Trajectory:
    """Convert back from `to_dict`."""
    return Trajectory(
        task=Task(**state["task"]),
        decisions=Decisions(**state["decisions"], extra=dict(state["extra"])),
        metrics=dict(state["metrics"]),
        **{name: state[name] for name in PLAIN_FIELDS},
    )
