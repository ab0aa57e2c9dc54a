"""What recipes read beside the attempts they learn from: other attempts at the same tasks, or other probabilities.

    extra["greedy"] (N,)    reward of the likeliest answers to the row's task (ReMax)
    extra["drift"] (N,)     mean |change of log-probability| of the task's last attempt since then [nats]

What is played here is played by a world of its own, whose tokens count, but whose attempts are not reported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.plugins import Registry
from robopolicy.text.model import head_of
from robopolicy.text.policy import TextPolicy
from robopolicy.text.rollouts.protocols import Attempt, Task
from robopolicy.text.rollouts.trajectories import joined
from robopolicy.text.scoring import collisions
from robopolicy.text.text_env import TextWorld, score

ROWS = 64  # conversations at once: attention is rows x heads x length x length numbers


Options = Mapping[str, Any]


class Summary(ABC):
    """One or more fields of rows, found by looking into the model."""

    whole: ClassVar[bool] = False  # looks at all rows together, and not at `ROWS` of them

    @abstractmethod
    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Fields of `extra` by name, given the options of the part that asks."""


@torch.no_grad()
def choice_norms(policy: TextPolicy, rows: Decisions, *draws: int) -> dict[str, Tensor]:
    """`collision`, or with three draws `collision3`, at the temperature of the rows."""
    tokens, start, mask = conversations_of(rows)
    heat = rows.extra["temperature"][mask.nonzero(as_tuple=True)[0]]
    head = head_of(policy.model)
    hidden, result = policy.states(tokens, start, mask), dict[str, Tensor]()
    for number in draws:
        found = collisions(hidden, head.weight, head.bias, heat, number)
        name = "collision" if number == 2 else f"collision{number}"
        result[name] = found.new_zeros(mask.shape).masked_scatter(mask, found)
    return result


class Collisions(Summary):
    """`collision`, for the optimal baseline of tokens."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """See the top of this module."""
        return choice_norms(policy, rows, 2)


SUMMARIES: Registry[type[Summary]] = Registry("features", {"optimal_token_baseline": Collisions})
"""Part of a recipe, or key that one reads -> what it asks for."""


def summaries_of(recipe: Mapping[str, Any]) -> dict[str, Options]:
    """Those of `SUMMARIES` that a plain recipe names, with the options of the part."""
    named = dict(named_parts(recipe))
    return {name: named[name] for name in SUMMARIES if name in named}


def summarised(policy: TextPolicy, rows: Decisions, wanted: Mapping[str, Options]) -> Decisions:
    """The rows with what parts read in `extra`.

    Raises:
        UserError: The policy is not causal.
    """
    if wanted and not policy.causal:
        raise UserError(
            f"Part '{next(iter(wanted))}' of this recipe reads a causal model (policy=text), not '{policy.name}'."
        )
    extra = dict(rows.extra)
    for name, options in wanted.items():
        find = SUMMARIES[name]()
        size = len(rows) if find.whole else ROWS
        blocks = (rows.select(slice(at, at + size)) for at in range(0, len(rows), size))
        parts = [find(policy, block, options) for block in blocks]
        extra |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return rows.with_fields(extra=extra)


def named_parts(plain: Any) -> Iterator[tuple[str, Options]]:
    """Every string among the values of a plain recipe, with the mapping in which it stands."""
    if isinstance(plain, Mapping):
        for value in plain.values():
            if isinstance(value, str):
                yield value, plain
            else:
                yield from named_parts(value)
    elif isinstance(plain, list | tuple):
        for value in plain:
            yield from [(value, {})] if isinstance(value, str) else named_parts(value)


def conversations_of(rows: Decisions) -> tuple[Tensor, Tensor, Tensor]:
    """`tokens`, `start` and `mask`, as `TextPolicy.score` takes them."""
    return rows.extra["tokens"], rows.extra["start"], rows.valid()


@dataclass(frozen=True)
class Worlds:
    """Where asides are played."""

    own: TextWorld  # of the policy
    start: TextWorld  # of the policy as it was when the run began


class Aside(ABC):
    """Finds one or more fields of rows; what it remembers goes into `state_dict`."""

    begins: ClassVar[bool] = False  # whether it asks the policy that the run began with
    key: ClassVar[str] = ""  # of `extra`, or "value", that it fills, where that is one field

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Self:
        """What a plain recipe asks for."""
        return cls()

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


class Drift(Aside):
    """How far the policy has moved at each task since it was attempted last; 0 where it was not."""

    def __init__(self) -> None:
        self.last: Decisions | None = None  # the last row of each task

    @torch.no_grad()
    def __call__(self, worlds: Worlds, attempts: Sequence[Attempt], rows: Decisions) -> Decisions:
        """Score the last attempts again, and remember these."""
        policy, group = worlds.own.policy, rows.require("group")
        names = {*policy.recorded, "support"} & rows.extra.keys()
        seen = {name: rows.extra[name] for name in sorted(names)}
        here = Decisions(rows.logp_old, mask=rows.valid(), group=group, extra=seen)
        newest = here.select(torch.tensor(list({key: row for row, key in enumerate(group.tolist())}.values())))
        drift = torch.zeros(len(rows))
        if self.last is not None:
            again = torch.isin(self.last.require("group"), group)
            if again.any():
                before = self.last.select(again.nonzero()[:, 0])
                change = (score(policy, before).logp.cpu() - before.logp_old).abs()
                mean = change.masked_fill(~before.valid(), 0.0).sum(1) / before.valid().sum(1).clamp(min=1)
                drift = (mean * (group[:, None] == before.require("group"))).sum(1)
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


ASIDES: Registry[type[Aside]] = Registry("annotators", {"greedy": Greedy, "half_life": Drift})
"""What a recipe names, a part, a key or an option that is not 0, -> what it asks for.

"gae_value" is asked for by a recipe that starts with values (`gae`) and has no critic.
"""


def asides_of(recipe: Mapping[str, Any], given: Mapping[str, Aside] | None = None) -> dict[str, Aside]:
    """Those of `ASIDES` that a plain recipe asks for, beside the `given` ones."""
    named = dict(named_parts(recipe))
    asked = set(named) | {option for part in named.values() for option, value in part.items() if value}
    valued = any(aside.key == "value" for aside in (given or {}).values())
    if recipe["critic"] is None and "gae" in named and not valued:
        asked.add("gae_value")
    return {**(given or {}), **{name: ASIDES[name].of(recipe) for name in ASIDES if name in asked}}


def plain(task: Task) -> Task:
    """The task without help."""
    return replace(task, prefix=None, context=None)


def rewards(attempts: Sequence[Attempt]) -> list[float]:
    """Rewards, 0 where an attempt could not be judged."""
    return [attempt.reward if math.isfinite(attempt.reward) else 0.0 for attempt in attempts]


def with_extra(rows: Decisions, **found: Any) -> Decisions:
    """The rows with further fields, given as tensors or as one number per row."""
    values = {name: torch.as_tensor(value, dtype=rows.logp_old.dtype) for name, value in found.items()}
    return rows.with_fields(extra={**rows.extra, **values})
