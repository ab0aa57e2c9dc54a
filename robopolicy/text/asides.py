"""What recipes read beside the attempts they learn from: other attempts at the same tasks, or other probabilities.

    extra["greedy"] (N,)            reward of the likeliest answers to the row's task (ReMax)
    extra["mean_ref"] (N,)          mean reward of attempts of the start of the run at the task (S182)
    extra["value_ref"] (N,)         best value of the task, beta log mean exp(R / beta), by the start of the run (A*-PO)
    extra["likelihood"] (N,)        of the task's solution under the start of the run (S122)
    extra["drift"] (N,)             mean |change of log-probability| of the task's last attempt since then [nats] (S037)
    value, extra["rollout_value"] (N, T)    mean return of attempts that go on from each message (S180)
    value, unit (N, T)              the same from each segment of a message, and the number of the segment (S013)
    extra["probe_accuracy"], extra["probe_confidence"] (N, T)   of the solution, asked for before each message (S149)
    extra["duration"] (N, T)        tokens of each message, which stand for its time (S062)

What is played here is played by a world of its own, whose tokens count, but whose attempts are not reported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.segments import Segments
from robopolicy.errors import UserError
from robopolicy.samplers.attempts import joined
from robopolicy.samplers.protocols import Attempt, Task
from robopolicy.text.summaries import named_parts
from robopolicy.text.world import TextWorld, score

SAMPLES = 8  # attempts of the start of the run at a task, from which its best value is estimated
BETA = 0.5  # of the best value, in rewards
ROLLOUTS = 4  # from each message


@dataclass(frozen=True)
class Worlds:
    """Where asides are played."""

    own: TextWorld  # of the policy
    start: TextWorld  # of the policy as it was when the run began


class Aside(ABC):
    """Finds one or more fields of rows; what it remembers goes into `state_dict`."""

    begins: ClassVar[bool] = False  # whether it asks the policy that the run began with

    @abstractmethod
    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """The rows of the attempts with the fields."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing, unless the aside says otherwise."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most asides remember nothing
        """Restore `state_dict`."""


class PerTask(Aside):
    """One number per task, found once for every task."""

    key: ClassVar[str]

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Ask for the tasks that are new."""
        missing = {attempt.task.key: plain(attempt.task) for attempt in attempts if attempt.task.key not in self.known}
        if missing:
            self.known |= zip(missing, self.ask(worlds, list(missing.values())), strict=True)
        return with_extra(rows, **{self.key: [self.known[attempt.task.key] for attempt in attempts]})

    @abstractmethod
    def ask(self, worlds: Worlds, tasks: Sequence[Task]) -> list[float]:
        """The numbers of tasks."""

    def state_dict(self) -> dict[str, Any]:
        """What is known."""
        return {"known": dict(self.known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.known = {int(key): float(value) for key, value in state["known"].items()}


class Greedy(PerTask):
    """Rewards of the likeliest answers, which change as the policy does."""

    key = "greedy"

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Ask for all tasks."""
        self.known.clear()
        return super().__call__(worlds, attempts, rows)

    def ask(self, worlds: Worlds, tasks: Sequence[Task]) -> list[float]:
        """Play without chance."""
        worlds.own.deterministic = True
        try:
            return rewards(worlds.own.play(tasks))
        finally:
            worlds.own.deterministic = False


class MeanValue(PerTask):
    """What the policy earns at the start of the run, on average."""

    key, begins = "mean_ref", True

    def ask(self, worlds: Worlds, tasks: Sequence[Task]) -> list[float]:
        """Play every task several times."""
        found = torch.tensor(rewards(worlds.start.play([task for task in tasks for _ in range(SAMPLES)])))
        return self.value(found.view(-1, SAMPLES)).tolist()

    def value(self, found: Tensor) -> Tensor:
        """Of tasks (M,) whose attempts earned this much (M, SAMPLES)."""
        return found.mean(1)


class BestValue(MeanValue):
    """What the best policy near the start of the run would earn."""

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


class Drift(Aside):
    """How far the policy has moved at each task since it was attempted last; 0 where it was not."""

    def __init__(self) -> None:
        self.last: Decisions | None = None  # the last row of each task

    @torch.no_grad()
    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Score the last attempts again, and remember these."""
        policy, group = worlds.own.policy, rows.need("group")
        names = {*policy.recorded, "support"} & rows.extra.keys()
        seen = {name: rows.extra[name] for name in sorted(names)}
        here = Decisions(rows.logp_old, mask=rows.valid(), group=group, extra=seen)
        newest = here.select(torch.tensor(list({key: row for row, key in enumerate(group.tolist())}.values())))
        drift = torch.zeros(len(rows))
        if self.last is not None:
            again = torch.isin(self.last.need("group"), group)
            if again.any():
                before = self.last.select(again.nonzero()[:, 0])
                change = (score(policy, before).logp.cpu() - before.logp_old).abs()
                mean = change.masked_fill(~before.valid(), 0.0).sum(1) / before.valid().sum(1).clamp(min=1)
                drift = (mean * (group[:, None] == before.need("group"))).sum(1)
            newest = joined([self.last.select((~again).nonzero()[:, 0]), newest])
        self.last = newest
        return with_extra(rows, drift=drift)

    def state_dict(self) -> dict[str, Any]:
        """The last rows."""
        if self.last is None:
            return {}
        return {"logp": self.last.logp_old, "mask": self.last.mask, "group": self.last.group, "extra": self.last.extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        if state:
            self.last = Decisions(state["logp"], mask=state["mask"], group=state["group"], extra=dict(state["extra"]))


class RolloutValue(Aside):
    """Mean return to the end before each message, over attempts that go on from there; a turn is a moment."""

    def __init__(self, key: str, gamma: float = 1.0) -> None:
        """Fill `extra[key]`, or the value itself, with returns that are discounted from turn to turn."""
        self.key, self.gamma = key, gamma

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Play on from every message; the first ones of a task are the same moment."""
        moments, places = moments_of(worlds.own, attempts)
        value = spread(mean_return(worlds.own, moments, self.gamma), places, rows)
        return rows.with_fields(value=value) if self.key == "value" else with_extra(rows, **{self.key: value})


class SegmentValue(Aside):
    """Mean reward to come before each segment of a message; units are segments then."""

    def __init__(self, every: int, below: float) -> None:
        """Cut behind every so many tokens that were less likely than `below`."""
        self.every, self.below = every, below

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Play on from every cut and message."""
        begins = beginnings(rows, self.every, self.below)
        columns = [row.nonzero()[1:, 0].tolist() for row in begins]
        rows = rows.with_fields(unit=(begins.cumsum(1) - 1).clamp(min=0))
        moments, places = moments_of(worlds.own, attempts, columns)
        return rows.with_fields(value=spread(mean_return(worlds.own, moments), places, rows))


class Probe(Aside):
    """How likely the solution's last message would be before each message, and how sure the policy is of it."""

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Score the solution at all moments."""
        moments, places = moments_of(worlds.own, attempts)
        accuracy, sure = (spread(value, places, rows) for value in solutions(worlds.own, moments))
        return with_extra(rows, probe_accuracy=accuracy, probe_confidence=sure)


class Duration(Aside):
    """Tokens of each message."""

    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Count them."""
        row = torch.arange(len(rows))[:, None]
        messages = Segments(row * (int(rows.need("unit").max()) + 1) + rows.need("unit"), rows.valid())
        return with_extra(rows, duration=messages.spread(messages.count).to(rows.logp_old.dtype))


ASIDES: dict[str, Callable[[Mapping[str, Any]], Aside]] = {
    "greedy": lambda _: Greedy(),
    "mean_ref": lambda _: MeanValue(),
    "value_ref": lambda _: BestValue(),
    "unlikely": lambda _: Likelihood(),
    "half_life": lambda _: Drift(),
    "value": lambda start: RolloutValue("value", start.get("gamma", 1.0)),
    "rollout_weight": lambda start: RolloutValue("rollout_value", start.get("gamma", 1.0)),
    "potential_gain": lambda _: Probe(),
    "duration": lambda _: Duration(),
}
"""What a recipe names, a part, a key or an option, -> what it asks for, given the options of its start `gae`."""


def asides_of(recipe: Mapping[str, Any]) -> dict[str, Aside]:
    """Those of `ASIDES` that a plain recipe asks for."""
    named = dict(named_parts(recipe))
    options = ("half_life", "rollout_weight")
    asked = set(named) | {key for part in named.values() for key in options if part.get(key)}
    cut = recipe["rollout"].get("segments")
    if recipe["critic"] is None and "gae" in named and not cut:
        asked.add("value")
    own = {"segments": SegmentValue(**cut)} if cut else {}
    return own | {name: make(named.get("gae", {})) for name, make in ASIDES.items() if name in asked}


def plain(task: Task) -> Task:
    """The task without help."""
    return replace(task, prefix=None, context=None)


def rewards(attempts: Sequence[Attempt]) -> list[float]:
    """Rewards, 0 where an attempt could not be judged."""
    return [attempt.reward if math.isfinite(attempt.reward) else 0.0 for attempt in attempts]


def mean_return(world: TextWorld, moments: Sequence[Task], gamma: float = 1.0) -> Tensor:
    """What attempts that go on from each moment earn on average `(M,)`."""
    played = world.play([task for task in moments for _ in range(ROLLOUTS)])
    return torch.tensor([to_come(attempt, gamma) for attempt in played]).view(-1, ROLLOUTS).mean(1)


def to_come(attempt: Attempt, gamma: float = 1.0) -> float:
    """Return of the turns that were played behind the beginning of the task, 0 where they could not be judged."""
    if attempt.record.fault:
        return 0.0
    before = len(attempt.task.prefix["said"]) if attempt.task.prefix is not None else 0
    return sum(gamma**turn * reward for turn, reward in enumerate(attempt.record.paid[before:]))


def beginnings(rows: Decisions, every: int, below: float) -> Tensor:
    """Bool `(N, T)`: begins a message, or follows every so many tokens of one that were less likely than `below`."""

    def before(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)

    unit, own = rows.need("unit"), rows.valid()
    first = own & ~(before(own) & (before(unit) == unit))
    unsure = own & (rows.logp_old < math.log(below))
    count = unsure.long().cumsum(1)
    earlier = torch.where(first, count - unsure.long(), 0).cummax(1).values  # in the messages before
    return first | (own & before(unsure & ((count - earlier) % every == 0)))


def moments_of(
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
            raise UserError("This recipe goes on from the middle of attempts, which needs players=0.")
        begin = first.setdefault(attempt.task.key, len(moments))
        later = attempt.record.starts[1 : int(attempt.metrics["turns"])] if columns is None else columns[row]
        if begin == len(moments):
            moments.append(plain(attempt.task))
        places.append([begin, *range(len(moments), len(moments) + len(later))])
        moments += [world.resume(attempt, column) for column in later]
    return moments, places


def spread(values: Tensor, places: Sequence[Sequence[int]], rows: Decisions) -> Tensor:
    """Values `(M,)` of moments at the decisions `(N, T)` of the messages that follow them."""
    unit, result = rows.need("unit"), torch.zeros_like(rows.logp_old)
    for row, numbers in enumerate(places):
        result[row] = values[torch.tensor(numbers)][unit[row].clamp(max=len(numbers) - 1)].to(result)
    return result


@torch.no_grad()
def solutions(world: TextWorld, tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Of the last messages of the tasks' solutions: geometric mean probability, and exp of minus the mean entropy."""
    written = [world.conclude(task) for task in tasks]
    known = [place for place, attempt in enumerate(written) if attempt is not None]
    found = torch.zeros(2, len(tasks))
    if known:
        batch = world.batch([attempt for attempt in written if attempt is not None])
        out, count = score(world.policy, batch), batch.valid().sum(1).clamp(min=1)
        for kind, values in zip(found, (out.logp, -out.entropy), strict=True):
            kind[known] = (values.cpu().sum(1) / count).exp()
    return found[0], found[1]


def with_extra(rows: Decisions, **found: Any) -> Decisions:
    """The rows with further fields, given as tensors or as one number per row."""
    values = {name: torch.as_tensor(value, dtype=rows.logp_old.dtype) for name, value in found.items()}
    return rows.with_fields(extra={**rows.extra, **values})
