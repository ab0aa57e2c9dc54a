"""The sampling side of a recipe as one object: it plays groups, and tells its parts how that went."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import NonNegativeInt, Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.options import validate_option
from robopolicy.core.registry import NESTED, REGISTRIES, build
from robopolicy.plugins import Registry
from robopolicy.text.rollouts.async_queue import STALENESS
from robopolicy.text.rollouts.prompt_samplers import SAMPLERS
from robopolicy.text.rollouts.protocols import (
    REPLAYED,
    Attempt,
    Intervention,
    Outcomes,
    Pool,
    Reward,
    Sampler,
    Staleness,
    Topology,
    World,
    rewards_of,
)
from robopolicy.text.rollouts.strategies import TOPOLOGIES
from robopolicy.text.rollouts.trajectories import from_dict, groups_of, to_dict


class Composition(Reward):
    """Rewards from left to right, starting with the verdict of the world."""

    def __init__(self, parts: Sequence[Reward]) -> None:
        self.parts = list(parts)
        self.followed = tuple(name for part in self.parts for name in part.followed)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Rewards `(M,)`."""
        for part in self.parts:
            outcomes = replace(outcomes, reward=part(outcomes))
        return outcomes.reward

    def follow(self, influence: Tensor) -> None:
        """Tell every part about its objectives."""
        counts = [len(part.followed) for part in self.parts]
        for part, own in zip(self.parts, influence.split(counts), strict=True):
            part.follow(own)

    def state_dict(self) -> dict[str, Any]:
        """States of the parts, by position."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def outcomes_of(attempts: Sequence[Attempt]) -> Outcomes:
    """Keys, verdicts and metrics of attempts; only metrics that all of them have."""
    names = set.intersection(*(set(attempt.metrics) for attempt in attempts)) if attempts else set()

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Outcomes(
        key=torch.tensor([attempt.task.key for attempt in attempts], dtype=torch.int64),
        reward=column([attempt.reward for attempt in attempts]),
        metrics={name: column([attempt.metrics[name] for attempt in attempts]) for name in sorted(names)},
    )


INTERVENTIONS: Registry[type[Intervention]] = Registry("parts.intervention", {})


REWARDS: Registry[type[Reward]] = Registry("parts.reward", {})


__all__ = ["build"]


REGISTRIES.update(
    sampler=SAMPLERS, topology=TOPOLOGIES, intervention=INTERVENTIONS, reward=REWARDS, staleness=STALENESS
)


NESTED.update(inner="topology")


DEFAULTS: dict[str, Any] = {
    "reward": [],  # composition of rewards, left to right; none: the verdict of the world
    "sampler": {"name": "uniform"},  # which tasks come next
    "topology": {"name": "flat"},  # how the attempts at a task hang together
    "intervention": [],  # what is done about groups that teach nothing, in order
    "temperature": 1.0,  # of the policy while it plays
    "refill": 0,  # times that dropped groups are replaced by playing others
    "again": False,  # the last batch is learned from once more, as `REPLAYED` rows with the rewards they had
    "staleness": {"name": "bounded", "limit": 0},  # how old weights may be, where play and learning overlap
}
"""The keys of `rollout` in a recipe and what they are where it is silent."""

PLAIN = {"temperature": Positive, "refill": NonNegativeInt, "again": bool}
"""Keys of `rollout` that hold no parts, and their types."""

OBJECTIVES = "objectives"
"""Key of `Decisions.extra` with what each row is worth (N, O) by every objective that the rewards name."""


@dataclass(frozen=True)
class Batch:
    """What is learned from next."""

    attempts: list[Attempt]  # with their composed rewards
    decisions: Decisions  # their rows
    lost: list[int]  # keys of attempts whose reward was no number; they are left out


class Collector:
    """Samples, plays, rewards and intervenes as the `rollout` section of a recipe says."""

    def __init__(
        self,
        plain: Mapping[str, Any],
        pool: Pool,
        world: World,
        *,
        group_size: int = 8,
        seed: int = 0,
        others: Collection[str] = (),
    ) -> None:
        """Build the parts.

        Args:
            plain: Keys of `DEFAULTS`.
            pool: What may be attempted; budgets and temperatures are set here.
            world: Where.
            group_size: Attempts per task.
            seed: Of the sampler.
            others: Further keys of `plain`, which the learner reads.

        Raises:
            ValueError: A key, name or option is unknown or does not fit; one line.
        """
        for key in plain:
            if key not in DEFAULTS and key not in others:
                raise ValueError(f"Unknown key '{key}' of rollout; known: {', '.join((*DEFAULTS, *others))}.")
        settings = {**DEFAULTS, **plain}
        for key, kind in PLAIN.items():
            validate_option(f"rollout.{key}", kind, settings[key])
        for key in ("reward", "intervention"):
            if not isinstance(settings[key], list | tuple):
                raise ValueError(f"rollout.{key} must be a list, got {settings[key]!r}.")
        self.world, self.refill = world, int(settings["refill"])
        self.sampler: Sampler = build("sampler", settings["sampler"])
        self.topology: Topology = build("topology", settings["topology"])
        self.reward = Composition([build("reward", entry) for entry in settings["reward"]])
        self.interventions: list[Intervention] = [build("intervention", entry) for entry in settings["intervention"]]
        self.staleness: Staleness = build("staleness", settings["staleness"])
        self.again, self._last = bool(settings["again"]), list[Attempt]()
        if self.again and self.reward.followed:
            raise ValueError("Rewards that follow gradients cannot judge the last batch again; leave one of them out.")
        temperature = float(settings["temperature"])
        tasks = [replace(task, budget=group_size, temperature=temperature) for task in pool.tasks]
        self.sampler.begin(replace(pool, tasks=tasks), seed)
        self._verdicts: list[tuple[int, float]] = []  # of what was played since `observe`
        self._lost: list[int] = []
        self._lock = threading.RLock()  # players of `samplers.staleness` come from several threads

    def play(self, n: int, world: World | None = None) -> list[list[Attempt]]:
        """Play `n` groups and intervene; fewer where groups were dropped and not refilled."""
        world, groups = world or self.world, []
        for _ in range(1 + self.refill):
            with self._lock:
                tasks = self.sampler.propose(n - len(groups))
            attempts = self.topology.rollout(world, tasks)
            with self._lock:
                sound = self._sound(attempts)
                self._verdicts += [(attempt.task.key, attempt.reward) for attempt in sound]
                groups += [helped for group in groups_of(sound) if (helped := self._helped(group, world))]
            if len(groups) >= n:
                break
        return groups

    def _helped(self, group: list[Attempt], world: World) -> list[Attempt]:
        for part in self.interventions:
            if group and part.triggered(rewards_of(group)):
                group = self._sound(part.rows(group, world))
        return group

    def _sound(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Those with a finite reward; the keys of the others are reported with the next batch."""
        self._lost += [attempt.task.key for attempt in attempts if not math.isfinite(attempt.reward)]
        return [attempt for attempt in attempts if math.isfinite(attempt.reward)]

    def batch(self, groups: Sequence[Sequence[Attempt]]) -> Batch:
        """Rewards and rows of groups.

        Raises:
            RuntimeError: There are none: everything was dropped or lost.
        """
        attempts = [attempt for group in groups for attempt in group]
        outcomes = outcomes_of(attempts)
        composed = self.reward(outcomes).tolist() if attempts else []
        with self._lock:
            for part in self.interventions:
                part.observe(groups)
            rewarded = [replace(attempt, reward=reward) for attempt, reward in zip(attempts, composed, strict=True)]
            attempts, lost, self._lost = self._sound(rewarded), self._lost, []
            if not attempts:
                raise RuntimeError("No group is left to learn from; raise rollout.refill or drop fewer.")
            if self.again:
                fresh = attempts
                attempts = [*fresh, *self._last]
                self._last = [replace(attempt, source=REPLAYED, record=None) for attempt in fresh]
        rows = self.world.batch(attempts)
        if self.reward.followed:
            sound = torch.tensor([math.isfinite(reward) for reward in composed])
            worth = torch.stack([outcomes.require(name)[sound] for name in self.reward.followed], 1)
            worth = worth.float().to(rows.logp_old.device)[rows.require("trajectory")]
            rows = rows.with_fields(extra={**rows.extra, OBJECTIVES: worth})
        return Batch(attempts, rows, lost)

    def collect(self, n: int) -> Batch:
        """Play and make rows of `n` groups."""
        return self.batch(self.play(n))

    def observe(self, batch: Batch, advantage: Tensor, influence: Tensor | None = None) -> None:
        """Tell the sampler and the rewards what was learned.

        Args:
            batch: What `collect` gave.
            advantage: (N, 1) or (N, T) of its rows, 0 for those that were not selected.
            influence: (O,) of the objectives of the rewards, see `Reward.follow`.
        """
        if influence is not None:
            self.reward.follow(influence)
        group, valid = batch.decisions.require("group"), batch.decisions.valid()
        size = advantage.detach().double().abs().expand(valid.shape).masked_fill(~valid, 0.0).sum(1)
        size = size / valid.sum(1).clamp(min=1)
        with self._lock:
            verdicts, self._verdicts = self._verdicts, []
            mean = {int(key): float(size[group == key].mean()) for key in group.unique()}
            keys = torch.tensor([key for key, _ in verdicts], dtype=torch.int64)
            rewards = torch.tensor([reward for _, reward in verdicts], dtype=torch.float64)
            known = torch.tensor([mean.get(key, 0.0) for key, _ in verdicts], dtype=torch.float64)
            if len(keys):
                self.sampler.observe(keys, rewards, known)

    def state_dict(self) -> dict[str, Any]:
        """States of the parts, between `observe` and the next `collect`."""
        last = [to_dict(attempt) for attempt in self._last]
        return {name: part.state_dict() for name, part in self._parts().items()} | {"last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next batches equal those of the uninterrupted run, if the world is restored too."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._last = [from_dict(attempt) for attempt in state["last"]]

    def _parts(self) -> dict[str, Any]:
        named = {"sampler": self.sampler, "topology": self.topology, "reward": self.reward}
        return named | {f"intervention.{number}": part for number, part in enumerate(self.interventions)}
