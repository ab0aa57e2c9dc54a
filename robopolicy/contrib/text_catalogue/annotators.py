"""Annotators of single recipes: further measurements of rollouts.

extra["mean_ref"] (N,)          mean reward of attempts of the start of the run at the task (A-LoL)
extra["value_ref"] (N,)         best value of the task, beta log mean exp(R / beta), by the start of the run (A*-PO)
extra["likelihood"] (N,)        of the task's solution under the start of the run (SELF)
value, extra["rollout_value"] (N, T)    mean return of attempts that go on from each message (ProAct)
value, unit (N, T)              the same from each segment of a message, and the number of the segment
extra["probe_accuracy"], extra["probe_confidence"] (N, T)   of the solution, asked for before each message (SPAE)
extra["duration"] (N, T)        tokens of each message, which stand for its time
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from robopolicy.contrib.text_catalogue.env_abilities import conclude
from robopolicy.core.decisions import Decisions
from robopolicy.core.segments import Segments
from robopolicy.errors import UserError
from robopolicy.text.annotators import Aside, PerTask, Worlds, named_parts, plain, rewards, with_extra
from robopolicy.text.rollouts.protocols import Attempt, Task
from robopolicy.text.text_env import TextWorld, score

SAMPLES = 8  # attempts of the start of the run at a task, from which its best value is estimated


BETA = 0.5  # of the best value, in rewards


ROLLOUTS = 4  # from each message


class MeanValue(PerTask):
    """Mean return of the initial policy."""

    key, begins = "mean_ref", True

    def ask(self, worlds: Worlds, tasks: Sequence[Task]) -> list[float]:
        """Roll out every task several times."""
        found = torch.tensor(rewards(worlds.start.play([task for task in tasks for _ in range(SAMPLES)])))
        return self.value(found.view(-1, SAMPLES)).tolist()

    def value(self, found: Tensor) -> Tensor:
        """Of tasks (M,) whose attempts earned this much (M, SAMPLES)."""
        return found.mean(1)


class BestValue(MeanValue):
    """Return of the best policy near the initial policy."""

    key = "value_ref"

    def value(self, found: Tensor) -> Tensor:
        """Soft maximum over the attempts."""
        return BETA * (torch.logsumexp(found / BETA, 1) - math.log(SAMPLES))


class Likelihood(PerTask):
    """How likely the solution is at the start of the run: geometric mean over its tokens, 0 where there is none."""

    key, begins = "likelihood", True

    def ask(self, worlds: Worlds, tasks: Sequence[Task]) -> list[float]:
        """Score the solutions."""
        return solutions(worlds.start, tasks)[0].tolist()


class RolloutValue(Aside):
    """Mean return to the end before each message, over attempts that go on from there; a turn is a moment."""

    key = "rollout_value"

    def __init__(self, gamma: float = 1.0) -> None:
        """Fill the field with returns that are discounted from turn to turn."""
        self.gamma = gamma

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Self:
        """Discounted as the start `gae` says."""
        return cls(dict(named_parts(recipe)).get("gae", {}).get("gamma", 1.0))

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Play on from every message; the first ones of a task are the same moment."""
        moments, places = cut_points(worlds.own, attempts)
        value = broadcast_values(mean_return(worlds.own, moments, self.gamma), places, rows)
        return rows.with_fields(value=value) if self.key == "value" else with_extra(rows, **{self.key: value})


class GaeValue(RolloutValue):
    """The same as the value of decisions, where no critic knows it."""

    key = "value"


class SegmentValue(Aside):
    """Mean reward to come before each segment of a message; units are segments then."""

    key = "value"

    def __init__(self, every: int, below: float) -> None:
        """Cut behind every so many tokens that were less likely than `below`."""
        self.every, self.below = every, below

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Play on from every cut and message."""
        begins = segment_starts(rows, self.every, self.below)
        columns = [row.nonzero()[1:, 0].tolist() for row in begins]
        rows = rows.with_fields(unit=(begins.cumsum(1) - 1).clamp(min=0))
        moments, places = cut_points(worlds.own, attempts, columns)
        return rows.with_fields(value=broadcast_values(mean_return(worlds.own, moments), places, rows))


class Probe(Aside):
    """How likely the solution's last message would be before each message, and how sure the policy is of it."""

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Score the solution at all moments."""
        moments, places = cut_points(worlds.own, attempts)
        accuracy, sure = (broadcast_values(value, places, rows) for value in solutions(worlds.own, moments))
        return with_extra(rows, probe_accuracy=accuracy, probe_confidence=sure)


class Duration(Aside):
    """Tokens of each message."""

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Count them."""
        row = torch.arange(len(rows))[:, None]
        messages = Segments(row * (int(rows.require("unit").max()) + 1) + rows.require("unit"), rows.valid())
        return with_extra(rows, duration=messages.broadcast(messages.count).to(rows.logp_old.dtype))


def mean_return(world: TextWorld, moments: Sequence[Task], gamma: float = 1.0) -> Tensor:
    """What attempts that go on from each moment earn on average `(M,)`."""
    played = world.play([task for task in moments for _ in range(ROLLOUTS)])
    return torch.tensor([return_to_go(attempt, gamma) for attempt in played]).view(-1, ROLLOUTS).mean(1)


def return_to_go(attempt: Attempt, gamma: float = 1.0) -> float:
    """Return of the turns after the beginning of the task, 0 where they have no reward."""
    if attempt.record.fault:
        return 0.0
    before = len(attempt.task.prefix["said"]) if attempt.task.prefix is not None else 0
    return sum(gamma**turn * reward for turn, reward in enumerate(attempt.record.paid[before:]))


def segment_starts(rows: Decisions, every: int, below: float) -> Tensor:
    """Bool `(N, T)`: begins a message, or follows every so many tokens of one that were less likely than `below`."""

    def before(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)

    unit, own = rows.require("unit"), rows.valid()
    first = own & ~(before(own) & (before(unit) == unit))
    unsure = own & (rows.logp_old < math.log(below))
    count = unsure.long().cumsum(1)
    earlier = torch.where(first, count - unsure.long(), 0).cummax(1).values  # in the messages before
    return first | (own & before(unsure & ((count - earlier) % every == 0)))


def cut_points(
    world: TextWorld, attempts: Sequence[Attempt], columns: Sequence[Sequence[int]] | None = None
) -> tuple[list[Task], list[list[int]]]:
    """Tasks that go on from before each message, equal first ones once, and their numbers for each attempt.

    With `columns` they go on from before these of each attempt's row, in place of the later messages.
    """
    moments: list[Task] = []
    first: dict[int, int] = {}
    places: list[list[int]] = []
    for row, attempt in enumerate(attempts):
        if attempt.record is None:
            raise UserError("This recipe continues from the middle of rollouts, which needs players=0.")
        begin = first.setdefault(attempt.task.key, len(moments))
        later = attempt.record.starts[1 : int(attempt.metrics["turns"])] if columns is None else columns[row]
        if begin == len(moments):
            moments.append(plain(attempt.task))
        places.append([begin, *range(len(moments), len(moments) + len(later))])
        moments += [world.resume(attempt, column) for column in later]
    return moments, places


def broadcast_values(values: Tensor, places: Sequence[Sequence[int]], rows: Decisions) -> Tensor:
    """Values `(M,)` of moments at the decisions `(N, T)` of the messages that follow them."""
    unit, result = rows.require("unit"), torch.zeros_like(rows.logp_old)
    for row, numbers in enumerate(places):
        result[row] = values[torch.tensor(numbers)][unit[row].clamp(max=len(numbers) - 1)].to(result)
    return result


@torch.no_grad()
def solutions(world: TextWorld, tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Of the last messages of the tasks' solutions: geometric mean probability, and exp of minus the mean entropy."""
    written = [conclude(world, task) for task in tasks]
    known = [place for place, attempt in enumerate(written) if attempt is not None]
    found = torch.zeros(2, len(tasks))
    if known:
        batch = world.batch([attempt for attempt in written if attempt is not None])
        out, count = score(world.policy, batch), batch.valid().sum(1).clamp(min=1)
        for kind, values in zip(found, (out.logp, -out.entropy), strict=True):
            kind[known] = (values.cpu().sum(1) / count).exp()
    return found[0], found[1]
