"""Rollouts in parts: in context windows, per unit, and over several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from robopolicy.constraints import NonNegativeInt, PositiveInt
from robopolicy.core.decisions import Decisions
from robopolicy.text.rollouts.protocols import Attempt, Task, Topology, World, able
from robopolicy.text.rollouts.strategies import Flat
from robopolicy.text.rollouts.trajectories import joined


class Segments(Topology):
    """Long attempts in context windows: at the limit the policy writes a summary and continues from it.

    Each window is a row of the attempt, and all share its advantage. What is unfinished after the last window is
    masked: it enters neither loss nor statistics. Source: Lu et al. 2025, SUPO.
    """

    def __init__(self, units: PositiveInt, summaries: NonNegativeInt = 2) -> None:
        """Validate and store the options.

        Args:
            units: Of one window, behind which the policy sums up if it has not finished.
            summaries: Windows after the first.
        """
        self.units, self.summaries = units, summaries

    def check(self, task: Any) -> None:
        """Refuse a task whose attempts end within the first window."""
        if self.units >= task.max_turns:
            raise ValueError(
                f"it sums up after {self.units} turns, and {task.name} has only {task.max_turns}; "
                "choose another recipe or task."
            )

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Roll out one window of all unfinished rollouts at a time, each after the summary of the earlier ones."""
        asked = [task for task in tasks for _ in range(task.budget)]
        attempts = world.play(asked, units=self.units)
        rows: list[list[Decisions]] = [[] for _ in asked]  # of windows that have ended with a summary
        for _ in range(self.summaries):
            places = [place for place, attempt in enumerate(attempts) if not attempt.finished]
            if not places:
                break
            told = able(world, "summarize")([attempts[place] for place in places])
            windows = world.play([task for _, task in told], units=self.units)
            for place, (before, _), window in zip(places, told, windows, strict=True):
                rows[place].append(before.decisions)
                attempts[place] = window
        whole = [
            replace(attempt, task=task, decisions=joined([*before, attempt.decisions]))
            for task, attempt, before in zip(asked, attempts, rows, strict=True)
        ]
        return [attempt if attempt.finished else without_decisions(attempt) for attempt in whole]


class PerTurn(Topology):
    """Every unit becomes a row (AgentFlow, Li et al. 2025), each with the reward of the whole.

    Statistics over rows then count long attempts more often, which this method wants.
    """

    def __init__(self, inner: Topology | None = None) -> None:
        self.inner = inner or Flat()

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Rows of units."""
        attempts = self.inner.rollout(world, tasks)
        return [replace(attempt, decisions=rows_of_units(attempt.decisions)) for attempt in attempts]


class PartialRollout(Topology):
    """Rollouts over several batches (T-PPO, Fan et al. 2025): at the end of a window unfinished ones are trained on.

    Unfinished ones go on in the next batch, in the place of fresh ones, and mark what was learned from before in
    `extra["seen"]` bool (n, T). For methods that value decisions, as there are no whole groups, and for one player.
    """

    def __init__(self, units: PositiveInt) -> None:
        self.units = units
        self._open: list[tuple[Task, int]] = []  # unfinished rollouts and their number of units

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """As many attempts as the budgets sum to."""
        fresh = [(task, 0) for task in tasks for _ in range(task.budget)]
        asked = [*self._open, *fresh][: len(fresh)]
        waiting = self._open[len(fresh) :]
        played = world.play([task for task, _ in asked], units=self.units)
        attempts: list[Attempt] = []
        for attempt, (_, before) in zip(played, asked, strict=True):
            unit = attempt.decisions.require("unit")
            extra = {**attempt.decisions.extra, "seen": unit < before}
            attempts.append(replace(attempt, decisions=attempt.decisions.with_fields(extra=extra)))
            if not attempt.finished:
                units = before + self.units
                waiting.append((able(world, "branch")(attempt, units), units))
        self._open = waiting
        return attempts

    def state_dict(self) -> dict[str, Any]:
        """Unfinished rollouts."""
        return {"open": [[vars(task), units] for task, units in self._open]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._open = [(Task(**task), int(units)) for task, units in state["open"]]


def rows_of_units(decisions: Decisions) -> Decisions:
    """Each row repeated for each of its units, with the others masked there."""
    unit, valid = decisions.require("unit"), decisions.valid()
    pieces: list[Decisions] = []
    for row in range(len(decisions)):
        for number in unit[row][valid[row]].unique().tolist():
            own = decisions.select(slice(row, row + 1))
            pieces.append(own.with_fields(mask=own.valid() & (own.require("unit") == number)))
    return cat(pieces) if pieces else decisions


def without_decisions(attempt: Attempt) -> Attempt:
    """The attempt with everything masked."""
    mask = torch.zeros_like(attempt.decisions.logp_old, dtype=torch.bool)
    return replace(attempt, decisions=attempt.decisions.with_fields(mask=mask))


def cat(batches: Sequence[Decisions]) -> Decisions:
    """Stack rows. All batches must have the same T and the same fields; ids are kept, so they must already differ."""
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
            raise ValueError(f"Some batches to stack have {item.name} and some have not.")
    return Decisions(**stacked)
