"""Partial rollouts: context windows, rows per unit, rollouts over several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from robopolicy.constraints import NonNegativeInt, PositiveInt
from robopolicy.core.decisions import Decisions
from robopolicy.text.rollouts.protocols import RolloutEnv, RolloutStrategy, Task, Trajectory, require_capability
from robopolicy.text.rollouts.strategies import Independent
from robopolicy.text.rollouts.trajectories import concat_rows


class SegmentRollouts(RolloutStrategy):
    """Long rollouts in context windows: at the limit, the policy writes a summary and continues from it.

    Source: SUPO, Lu et al. 2025.

    Each window is a row of the trajectory, and all share its advantage. Trajectories that are unfinished after the last
    window are masked in loss and statistics.
    """

    def __init__(self, units: PositiveInt, summaries: NonNegativeInt = 2) -> None:
        """Validate and store the options.

        Args:
            units: Units of a window, after which the policy writes a summary.
            summaries: Maximum number of windows after the first.
        """
        self.units, self.summaries = units, summaries

    def check(self, task: Any) -> None:
        """Check that episodes of the task exceed the first window."""
        if self.units >= task.max_turns:
            raise ValueError(
                f"it writes a summary after {self.units} turns, and {task.name} has only {task.max_turns}; "
                "choose another recipe or task."
            )

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out window by window, each after the summary of the previous windows."""
        requests = [task for task in tasks for _ in range(task.budget)]
        trajectories = env.rollout(requests, units=self.units)
        rows: list[list[Decisions]] = [[] for _ in requests]  # windows that ended with a summary
        for _ in range(self.summaries):
            places = [place for place, trajectory in enumerate(trajectories) if not trajectory.finished]
            if not places:
                break
            summarized = require_capability(env, "summarize")([trajectories[place] for place in places])
            windows = env.rollout([task for _, task in summarized], units=self.units)
            for place, (before, _), window in zip(places, summarized, windows, strict=True):
                rows[place].append(before.decisions)
                trajectories[place] = window
        whole = [
            replace(trajectory, task=task, decisions=concat_rows([*before, trajectory.decisions]))
            for task, trajectory, before in zip(requests, trajectories, rows, strict=True)
        ]
        return [trajectory if trajectory.finished else without_decisions(trajectory) for trajectory in whole]


class PerTurn(RolloutStrategy):
    """One row per unit (AgentFlow, Li et al. 2025), with the reward of the trajectory.

    As in the source, statistics over rows count long trajectories more often.
    """

    def __init__(self, inner: RolloutStrategy | None = None) -> None:
        self.inner = inner or Independent()

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out and split into rows."""
        trajectories = self.inner.rollout(env, tasks)
        return [replace(trajectory, decisions=rows_of_units(trajectory.decisions)) for trajectory in trajectories]


class PartialRollout(RolloutStrategy):
    """Rollouts over several batches (T-PPO, Fan et al. 2025) that are trained on at the end of each window.

    Unfinished rollouts continue in the next batch instead of new ones; `extra["seen"]` bool (n, T) marks decisions of
    earlier updates. For methods with a critic, since groups are incomplete, and for a single worker.
    """

    def __init__(self, units: PositiveInt) -> None:
        self.units = units
        self._open: list[tuple[Task, int]] = []  # unfinished rollouts and their number of units

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Return as many trajectories as the sum of the budgets."""
        fresh = [(task, 0) for task in tasks for _ in range(task.budget)]
        requests = [*self._open, *fresh][: len(fresh)]
        waiting = self._open[len(fresh) :]
        rollouts = env.rollout([task for task, _ in requests], units=self.units)
        trajectories: list[Trajectory] = []
        for trajectory, (_, before) in zip(rollouts, requests, strict=True):
            unit = trajectory.decisions.require("unit")
            extra = {**trajectory.decisions.extra, "seen": unit < before}
            trajectories.append(replace(trajectory, decisions=trajectory.decisions.with_fields(extra=extra)))
            if not trajectory.finished:
                units = before + self.units
                waiting.append((require_capability(env, "branch")(trajectory, units), units))
        self._open = waiting
        return trajectories

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished rollouts."""
        return {"open": [[vars(task), units] for task, units in self._open]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._open = [(Task(**task), int(units)) for task, units in state["open"]]


def rows_of_units(decisions: Decisions) -> Decisions:
    """Repeat each row for each of its units, with the other units masked."""
    unit, valid = decisions.require("unit"), decisions.valid()
    pieces: list[Decisions] = []
    for row in range(len(decisions)):
        for number in unit[row][valid[row]].unique().tolist():
            own = decisions.select(slice(row, row + 1))
            pieces.append(own.with_fields(mask=own.valid() & (own.require("unit") == number)))
    return cat(pieces) if pieces else decisions


def without_decisions(trajectory: Trajectory) -> Trajectory:
    """Mask all decisions of the trajectory."""
    mask = torch.zeros_like(trajectory.decisions.logp_old, dtype=torch.bool)
    return replace(trajectory, decisions=trajectory.decisions.with_fields(mask=mask))


def cat(batches: Sequence[Decisions]) -> Decisions:
    """Concatenate rows of batches with equal T and fields; ids are unchanged and must already differ."""
    if not batches:
        raise ValueError("cat needs at least one batch.")
    first = batches[0]
    for other in batches[1:]:
        if other.shape[1] != first.shape[1]:
            raise ValueError(f"Rows of {first.shape[1]} and {other.shape[1]} decisions cannot be stacked; pad first.")
    stacked: dict[str, Any] = {}
    for item in fields(Decisions):
        values = [getattr(batch, item.name) for batch in batches]
        if item.name == "extra":
            if any(value.keys() != first.extra.keys() for value in values):
                raise ValueError("Batches to stack must have the same extra fields.")
            stacked["extra"] = {key: torch.cat([value[key] for value in values]) for key in first.extra}
        elif all(value is not None for value in values):
            stacked[item.name] = torch.cat(values)
        elif any(value is not None for value in values):
            raise ValueError(f"Some batches to stack have {item.name} and some do not.")
    return Decisions(**stacked)
