"""Annotators of rollouts: further rollouts of the same tasks, or other probabilities.

    extra["greedy"] (N,)    reward of the greedy response to the row's task (ReMax)
    extra["drift"] (N,)     mean |change of log-probability| since the last rollout of the task [nats]

Annotators use separate environments. Their tokens count as generated; their rollouts are not logged.
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
from robopolicy.text.rollouts.protocols import Task, Trajectory
from robopolicy.text.rollouts.trajectories import concat_rows
from robopolicy.text.scoring import collisions
from robopolicy.text.text_env import TextEnv, score

BLOCK_ROWS = 64  # conversations per forward pass: attention has rows x heads x length x length numbers
Options = Mapping[str, Any]


class FeatureExtractor(ABC):
    """Base class of feature extractors: each computes one or more fields of rows with the model."""

    needs_full_batch: ClassVar[bool] = False  # processes all rows together instead of blocks of `BLOCK_ROWS`

    @abstractmethod
    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute fields of `extra` by name, given the options of the requesting part."""


@torch.no_grad()
def collision_features(policy: TextPolicy, rows: Decisions, *draws: int) -> dict[str, Tensor]:
    """Compute `collision`, or with three draws `collision3`, at the temperature of the rows."""
    tokens, start, mask = score_inputs(rows)
    places = policy.locate(tokens, start, mask)
    temperatures = rows.extra["temperature"].to(places.row.device)[places.row]
    head = head_of(policy.model)
    hidden, result = policy.states(places), dict[str, Tensor]()
    for number in draws:
        found = collisions(hidden, head.weight, head.bias, temperatures, number)
        name = "collision" if number == 2 else f"collision{number}"
        result[name] = places.spread(found)
    return result


class CollisionFeatures(FeatureExtractor):
    """`collision` (N, T), for the optimal token baseline."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the field."""
        return collision_features(policy, rows, 2)


FEATURES: Registry[type[FeatureExtractor]] = Registry("features", {"optimal_token_baseline": CollisionFeatures})
"""Name of a part of a recipe, or key that a part reads -> extractor."""


def requested_features(recipe: Mapping[str, Any]) -> dict[str, Options]:
    """Return the entries of `FEATURES` that a plain recipe names, with the options of the part."""
    named = dict(named_parts(recipe))
    return {name: named[name] for name in FEATURES if name in named}


def with_features(policy: TextPolicy, rows: Decisions, requested: Mapping[str, Options]) -> Decisions:
    """Add the requested features to `extra` of the rows.

    Raises:
        UserError: The policy is not causal.
    """
    if requested and not policy.causal:
        raise UserError(
            f"Part '{next(iter(requested))}' of this recipe reads a causal model (policy=text), not '{policy.name}'."
        )
    extra = dict(rows.extra)
    for name, options in requested.items():
        find = FEATURES[name]()
        size = len(rows) if find.needs_full_batch else BLOCK_ROWS
        blocks = (rows.select(slice(at, at + size)) for at in range(0, len(rows), size))
        parts = [find(policy, block, options) for block in blocks]
        extra |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return rows.with_fields(extra=extra)


def named_parts(plain: Any) -> Iterator[tuple[str, Options]]:
    """Yield every string value of a plain recipe with the mapping that contains it."""
    if isinstance(plain, Mapping):
        for value in plain.values():
            if isinstance(value, str):
                yield value, plain
            else:
                yield from named_parts(value)
    elif isinstance(plain, list | tuple):
        for value in plain:
            yield from [(value, {})] if isinstance(value, str) else named_parts(value)


def score_inputs(rows: Decisions) -> tuple[Tensor, Tensor, Tensor]:
    """Return `tokens`, `start` and `mask`, the arguments of `TextPolicy.score`."""
    return rows.extra["tokens"], rows.extra["start"], rows.valid()


@dataclass(frozen=True)
class AnnotatorEnvs:
    """Environments of the annotators."""

    current: TextEnv  # of the policy
    initial: TextEnv  # of the initial policy


class RolloutAnnotator(ABC):
    """Base class of annotators, which add one or more fields to rows; `state_dict` contains all of their state."""

    needs_initial_policy: ClassVar[bool] = False  # rolls out the initial policy
    key: ClassVar[str] = ""  # key of `extra`, or "value", of annotators with one field

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> Self:
        """Build the annotator from the options of a plain recipe."""
        return cls()

    @abstractmethod
    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Add the fields to the rows of the trajectories."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""


class PerTaskAnnotator(RolloutAnnotator):
    """One number per task, computed once and cached."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Compute the numbers of new tasks."""
        missing = {task.key: plain(task) for task in (one.task for one in trajectories) if task.key not in self.known}
        if missing:
            self.known |= zip(missing, self.compute(envs, list(missing.values())), strict=True)
        return with_extra(rows, **{self.key: [self.known[trajectory.task.key] for trajectory in trajectories]})

    @abstractmethod
    def compute(self, envs: AnnotatorEnvs, tasks: Sequence[Task]) -> list[float]:
        """Compute the numbers of tasks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the cached numbers by task key."""
        return {"known": dict(self.known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.known = {int(key): float(value) for key, value in state["known"].items()}


class GreedyReward(PerTaskAnnotator):
    """Reward of the greedy response, computed for every batch."""

    key = "greedy"

    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Compute the rewards of all tasks."""
        self.known.clear()
        return super().__call__(envs, trajectories, rows)

    def compute(self, envs: AnnotatorEnvs, tasks: Sequence[Task]) -> list[float]:
        """Roll out the tasks greedily."""
        envs.current.deterministic = True
        try:
            return rewards(envs.current.rollout(tasks))
        finally:
            envs.current.deterministic = False


class PolicyDrift(RolloutAnnotator):
    """Change of the policy at each task since its last rollout; 0 for tasks without one."""

    def __init__(self) -> None:
        self.last: Decisions | None = None  # the last row of each task

    @torch.no_grad()
    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Score the previous rollouts again and store the current ones."""
        policy, group = envs.current.policy, rows.require("group")
        names = {*policy.score_fields, "support"} & rows.extra.keys()
        inputs = {name: rows.extra[name] for name in sorted(names)}
        current = Decisions(rows.logp_old, mask=rows.valid(), group=group, extra=inputs)
        newest = current.select(torch.tensor(list({key: row for row, key in enumerate(group.tolist())}.values())))
        drift = torch.zeros(len(rows))
        if self.last is not None:
            again = torch.isin(self.last.require("group"), group)
            if again.any():
                before = self.last.select(again.nonzero()[:, 0])
                change = (score(policy, before).logp.cpu() - before.logp_old).abs()
                mean = change.masked_fill(~before.valid(), 0.0).sum(1) / before.valid().sum(1).clamp(min=1)
                drift = (mean * (group[:, None] == before.require("group"))).sum(1)
            newest = concat_rows([self.last.select((~again).nonzero()[:, 0]), newest])
        self.last = newest
        return with_extra(rows, drift=drift)

    def state_dict(self) -> dict[str, Any]:
        """Return the last rows."""
        if self.last is None:
            return {}
        return {"logp": self.last.logp_old, "mask": self.last.mask, "group": self.last.group, "extra": self.last.extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        if state:
            self.last = Decisions(state["logp"], mask=state["mask"], group=state["group"], extra=dict(state["extra"]))


ANNOTATORS: Registry[type[RolloutAnnotator]] = Registry(
    "annotators", {"greedy": GreedyReward, "half_life": PolicyDrift}
)
"""Part, key or non-zero option in a recipe -> annotator; advantage source `gae` without a critic -> "gae_value"."""


def requested_annotators(
    recipe: Mapping[str, Any], given: Mapping[str, RolloutAnnotator] | None = None
) -> dict[str, RolloutAnnotator]:
    """Return the `given` annotators and the entries of `ANNOTATORS` that a plain recipe requests."""
    named = dict(named_parts(recipe))
    requests = set(named) | {option for part in named.values() for option, value in part.items() if value}
    valued = any(annotator.key == "value" for annotator in (given or {}).values())
    if recipe["critic"] is None and "gae" in named and not valued:
        requests.add("gae_value")
    return {**(given or {}), **{name: ANNOTATORS[name].from_recipe(recipe) for name in ANNOTATORS if name in requests}}


def plain(task: Task) -> Task:
    """Remove prefix and context from a task."""
    return replace(task, prefix=None, context=None)


def rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the rewards, 0 where the reward function failed."""
    return [trajectory.reward if math.isfinite(trajectory.reward) else 0.0 for trajectory in trajectories]


def with_extra(rows: Decisions, **found: Any) -> Decisions:
    """Add `extra` fields to rows, given as tensors or as one number per row."""
    values = {name: torch.as_tensor(value, dtype=rows.logp_old.dtype) for name, value in found.items()}
    return rows.with_fields(extra={**rows.extra, **values})
