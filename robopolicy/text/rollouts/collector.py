"""Collection of rollouts: samples tasks, rolls them out, computes rewards and reports the results to its parts."""

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
    Intervention,
    Outcomes,
    PromptPool,
    Reward,
    RolloutEnv,
    RolloutStrategy,
    Sampler,
    Staleness,
    Trajectory,
    rewards_of,
)
from robopolicy.text.rollouts.strategies import STRATEGIES
from robopolicy.text.rollouts.trajectories import from_dict, group_by_task, to_dict


class RewardChain(Reward):
    """Rewards applied from left to right, starting with the reward of the environment."""

    def __init__(self, parts: Sequence[Reward]) -> None:
        self.parts = list(parts)
        self.weighted_objectives = tuple(name for part in self.parts for name in part.weighted_objectives)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        for part in self.parts:
            outcomes = replace(outcomes, reward=part(outcomes))
        return outcomes.reward

    def set_influence(self, influence: Tensor) -> None:
        """Pass the influence of its objectives to every part."""
        counts = [len(part.weighted_objectives) for part in self.parts]
        for part, own in zip(self.parts, influence.split(counts), strict=True):
            part.set_influence(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts by position."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def collect_outcomes(trajectories: Sequence[Trajectory]) -> Outcomes:
    """Collect keys, rewards and metrics of trajectories; metrics that some of them lack are left out."""
    names = set.intersection(*(set(trajectory.metrics) for trajectory in trajectories)) if trajectories else set()

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Outcomes(
        key=torch.tensor([trajectory.task.key for trajectory in trajectories], dtype=torch.int64),
        reward=column([trajectory.reward for trajectory in trajectories]),
        metrics={name: column([trajectory.metrics[name] for trajectory in trajectories]) for name in sorted(names)},
    )


INTERVENTIONS: Registry[type[Intervention]] = Registry("parts.intervention", {})
REWARDS: Registry[type[Reward]] = Registry("parts.reward", {})
REGISTRIES.update(
    sampler=SAMPLERS, strategy=STRATEGIES, intervention=INTERVENTIONS, reward=REWARDS, staleness=STALENESS
)
NESTED.update(inner="strategy")

DEFAULTS: dict[str, Any] = {
    "reward": [],  # chain of rewards, left to right; empty: the reward of the environment
    "sampler": {"name": "uniform"},  # choice of the next tasks
    "strategy": {"name": "independent"},  # dependence of the rollouts of a task on each other
    "intervention": [],  # replacements of groups without a learning signal, in order
    "temperature": 1.0,  # sampling temperature
    "max_resample_rounds": 0,  # rounds of new groups that replace dropped ones
    "replay_last_batch": False,  # train on the last batch again, as `REPLAYED` rows with their old rewards
    "staleness": {"name": "bounded", "limit": 0},  # maximum age of weights of asynchronous rollouts
}
"""The keys of `rollout` in a recipe and their defaults."""
SCALAR_OPTIONS = {"temperature": Positive, "max_resample_rounds": NonNegativeInt, "replay_last_batch": bool}
"""Keys of `rollout` without parts, and their types."""
OBJECTIVES = "objectives"
"""Key of `Decisions.extra` with the values (N, O) of the objectives that the rewards name."""


@dataclass(frozen=True)
class Batch:
    """The next training batch."""

    trajectories: list[Trajectory]  # with their final rewards
    decisions: Decisions  # rows of the trajectories
    invalid: list[int]  # keys of the trajectories that were dropped because of an invalid reward


class Collector:
    """The loop of task sampling, rollouts, rewards and interventions, set by the `rollout` section of a recipe."""

    def __init__(
        self,
        plain: Mapping[str, Any],
        pool: PromptPool,
        env: RolloutEnv,
        *,
        group_size: int = 8,
        seed: int = 0,
        extra_keys: Collection[str] = (),
    ) -> None:
        """Build the parts.

        Args:
            plain: Keys of `DEFAULTS`.
            pool: Tasks to sample from; the collector sets their budgets and temperatures.
            env: Environment.
            group_size: Rollouts per task.
            seed: Seed of the sampler.
            extra_keys: Further keys of `plain`, which the learner uses.

        Raises:
            ValueError: A key, name or option is unknown or invalid.
        """
        if unknown := [key for key in plain if key not in DEFAULTS and key not in extra_keys]:
            raise ValueError(f"Unknown key '{unknown[0]}' of rollout; known: {', '.join((*DEFAULTS, *extra_keys))}.")
        settings = {**DEFAULTS, **plain}
        for key, kind in SCALAR_OPTIONS.items():
            validate_option(f"rollout.{key}", kind, settings[key])
        for key in ("reward", "intervention"):
            if not isinstance(settings[key], list | tuple):
                raise ValueError(f"rollout.{key} must be a list, got {settings[key]!r}.")
        self.env, self.max_resample_rounds = env, int(settings["max_resample_rounds"])
        self.sampler: Sampler = build("sampler", settings["sampler"])
        self.strategy: RolloutStrategy = build("strategy", settings["strategy"])
        self.reward = RewardChain([build("reward", entry) for entry in settings["reward"]])
        self.interventions: list[Intervention] = [build("intervention", entry) for entry in settings["intervention"]]
        self.staleness: Staleness = build("staleness", settings["staleness"])
        self.replay_last_batch, self._last = bool(settings["replay_last_batch"]), list[Trajectory]()
        if self.replay_last_batch and self.reward.weighted_objectives:
            raise ValueError("Rewards with objectives cannot be combined with replay_last_batch; remove one of them.")
        temperature = float(settings["temperature"])
        tasks = [replace(task, budget=group_size, temperature=temperature) for task in pool.tasks]
        self.sampler.setup(replace(pool, tasks=tasks), seed)
        self._task_rewards: list[tuple[int, float]] = []  # of the rollouts since `observe`
        self._invalid: list[int] = []
        self._lock = threading.RLock()  # rollout workers call from several threads

    def collect_groups(self, n: int, env: RolloutEnv | None = None) -> list[list[Trajectory]]:
        """Roll out `n` groups and intervene; returns fewer if groups were dropped and not replaced."""
        env, groups = env or self.env, []
        for _ in range(1 + self.max_resample_rounds):
            with self._lock:
                tasks = self.sampler.propose(n - len(groups))
            trajectories = self.strategy.rollout(env, tasks)
            with self._lock:
                valid = self._drop_invalid(trajectories)
                self._task_rewards += [(trajectory.task.key, trajectory.reward) for trajectory in valid]
                groups += [assisted for group in group_by_task(valid) if (assisted := self._intervene(group, env))]
            if len(groups) >= n:
                break
        return groups

    def _intervene(self, group: list[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        for part in self.interventions:
            if group and part.applies(rewards_of(group)):
                group = self._drop_invalid(part.apply(group, env))
        return group

    def _drop_invalid(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Keep trajectories with a finite reward; the next batch reports the keys of the others."""
        self._invalid += [trajectory.task.key for trajectory in trajectories if not math.isfinite(trajectory.reward)]
        return [trajectory for trajectory in trajectories if math.isfinite(trajectory.reward)]

    def batch(self, groups: Sequence[Sequence[Trajectory]]) -> Batch:
        """Compute rewards and rows of groups.

        Raises:
            RuntimeError: All groups were dropped or invalid.
        """
        trajectories = [trajectory for group in groups for trajectory in group]
        outcomes = collect_outcomes(trajectories)
        rewards = self.reward(outcomes).tolist() if trajectories else []
        with self._lock:
            for part in self.interventions:
                part.observe(groups)
            rewarded = [replace(one, reward=reward) for one, reward in zip(trajectories, rewards, strict=True)]
            trajectories, invalid, self._invalid = self._drop_invalid(rewarded), self._invalid, []
            if not trajectories:
                raise RuntimeError("No group is left to train on; raise rollout.max_resample_rounds or drop fewer.")
            if self.replay_last_batch:
                last, self._last = self._last, [replace(one, source=REPLAYED, record=None) for one in trajectories]
                trajectories = [*trajectories, *last]
        rows = self.env.batch(trajectories)
        if self.reward.weighted_objectives:
            valid = torch.tensor([math.isfinite(reward) for reward in rewards])
            values = torch.stack([outcomes.require(name)[valid] for name in self.reward.weighted_objectives], 1)
            values = values.float().to(rows.logp_old.device)[rows.require("trajectory")]
            rows = rows.with_fields(extra={**rows.extra, OBJECTIVES: values})
        return Batch(trajectories, rows, invalid)

    def collect(self, n: int) -> Batch:
        """Roll out `n` groups and return their batch."""
        return self.batch(self.collect_groups(n))

    def observe(self, batch: Batch, advantage: Tensor, influence: Tensor | None = None) -> None:
        """Report the results of an update to the sampler and the rewards.

        Args:
            batch: Result of `collect`.
            advantage: (N, 1) or (N, T) of its rows, 0 for rows that were not selected.
            influence: (O,) argument of `Reward.set_influence`.
        """
        if influence is not None:
            self.reward.set_influence(influence)
        group, valid = batch.decisions.require("group"), batch.decisions.valid()
        size = advantage.detach().double().abs().expand(valid.shape).masked_fill(~valid, 0.0).sum(1)
        size = size / valid.sum(1).clamp(min=1)
        with self._lock:
            task_rewards, self._task_rewards = self._task_rewards, []
            mean = {int(key): float(size[group == key].mean()) for key in group.unique()}
            keys = torch.tensor([key for key, _ in task_rewards], dtype=torch.int64)
            rewards = torch.tensor([reward for _, reward in task_rewards], dtype=torch.float64)
            known = torch.tensor([mean.get(key, 0.0) for key, _ in task_rewards], dtype=torch.float64)
            if len(keys):
                self.sampler.observe(keys, rewards, known)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts, between `observe` and the next `collect`."""
        last = [to_dict(trajectory) for trajectory in self._last]
        return {name: part.state_dict() for name, part in self._parts().items()} | {"last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; with a restored environment, the next batches are as without interruption."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._last = [from_dict(trajectory) for trajectory in state["last"]]

    def _parts(self) -> dict[str, Any]:
        named = {"sampler": self.sampler, "strategy": self.strategy, "reward": self.reward}
        return named | {f"intervention.{number}": part for number, part in enumerate(self.interventions)}
