"""Rollouts of a text policy, collected between updates, or asynchronously in a thread or in processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, frozen_copy
from robopolicy.core.decisions import Decisions, MissingField
from robopolicy.core.registry import build
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.text.annotators import AnnotatorEnvs
from robopolicy.text.engines import ENGINES, NATIVE
from robopolicy.text.evaluation import pass_at_k
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.rollouts.async_queue import BoundedStaleness, NoUsableGroupsError, RolloutQueue, RolloutWorkers
from robopolicy.text.rollouts.collector import DEFAULTS, Batch, Collector
from robopolicy.text.rollouts.protocols import (
    PromptPool,
    RolloutEnv,
    Staleness,
    Task,
    Trajectory,
    degenerate,
    rewards_of,
)
from robopolicy.text.rollouts.trajectories import group_by_task
from robopolicy.text.scoring_options import SCORING_OPTIONS
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.text.text_env import TextEnv
from robopolicy.training.workers import RemoteRolloutEnv, packed_weights, start_workers

MAX_SHOWN_ERRORS = 5  # printed reward errors per update
MAX_EMPTY_BATCHES = 20  # batches without a usable group before the run fails
DRAWS_PER_PROMPT = 4  # draws in the search for different prompts


@dataclass(frozen=True)
class TextPromptPool(PromptPool):
    """Tasks with categories and difficulties computed on demand."""

    task: TextTask | None = None

    def require(self, name: str) -> Tensor:
        """Return a field of the tasks as a tensor; see `PromptPool`."""
        found = [getattr(self.task, name)(int(task.payload)) for task in self.tasks]
        return super().require(name) if None in found else torch.tensor(found)


class TextSource:
    """Base class of text sources."""

    def __init__(self, sim: TextSim, seed: int) -> None:
        self.sim, self.task, self.seed = sim, sim.task, seed
        self.env_steps = 0  # messages of the policy so far
        self._metrics: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """Return and reset the metrics."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def observations(self) -> Observation:
        """Return the first prompts of training."""
        return {key: value.unsqueeze(1) for key, value in self.sim.reset(self.seed).items()}

    def close(self) -> None:
        """Stop the reward thread."""
        self.sim.close()


class TextRolloutSource(TextSource):
    """Rollouts of the policy, configured by the section `rollout` of a recipe."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        self.algorithm = algorithm
        self.env = self._env(algorithm.policy)
        self.annotators = algorithm.annotators()
        self._annotator_generator = torch.Generator().manual_seed(seed + 1)
        self._annotator_tokens = 0  # tokens of the annotators; the environment counts its own, possibly in a thread
        config = algorithm.config
        self.pool = TextPromptPool(
            training_prompts(self.task, seed, config.num_prompts, config.prompts_per_update), task=self.task
        )
        plain = {"temperature": algorithm.policy.config.temperature, **algorithm.recipe.rollout}
        try:
            size = algorithm.group_size
            self.collector = Collector(
                plain, self.pool, self.env, group_size=size, seed=seed, extra_keys=SCORING_OPTIONS
            )
            self.collector.strategy.check(self.task)
        except ValueError as error:
            raise UserError(f"Recipe '{algorithm.config.recipe}': {error}") from error
        self._batch: Batch | None = None  # not yet reported to the collector

    @property
    def generated(self) -> int:
        """Number of generated tokens so far."""
        return self.env.generated + self._annotator_tokens

    def next(self, algorithm: Algorithm) -> Decisions:
        """Collect the next groups; repeated if all of them are dropped."""
        self._observe_last()
        self.env.set_version(algorithm.updates)
        for _ in range(MAX_EMPTY_BATCHES):
            groups = self._collect()
            if groups:
                break
        else:
            raise self._no_usable_groups()
        self._batch = self._make_batch(groups)
        completed, self.env.completed = self.env.completed, []
        self._update_metrics(completed)
        return self._annotate(self._batch)

    def _annotate(self, batch: Batch) -> Decisions:
        """Apply the annotators to the batch."""
        rows = batch.decisions
        if self.annotators:
            envs = self._annotator_envs()
            for annotator in self.annotators.values():
                rows = annotator(envs, batch.trajectories, rows)
            for env in (envs.current, envs.initial):
                self._annotator_tokens += env.generated
                env.reward_runner.close()
        return rows

    def _annotator_envs(self) -> AnnotatorEnvs:
        """Create environments with the current and with the initial policy for the annotators."""
        policies = (self.algorithm.policy, self.algorithm.reference_policy or self.algorithm.policy)
        return AnnotatorEnvs(*(policy.env_class(policy, self.task, self._annotator_generator) for policy in policies))

    def _env(self, policy: TextPolicy) -> TextEnv:
        env = policy.env_class(policy, self.task, torch.Generator().manual_seed(self.seed))
        for option in self.algorithm.options.values():
            option.configure_env(env, self.algorithm)
        if self.algorithm.config.engine != NATIVE:
            env.engine = ENGINES[self.algorithm.config.engine](policy)
        return env

    def _collect(self) -> list[list[Trajectory]]:
        try:
            return self.collector.collect_groups(self.algorithm.config.prompts_per_update)
        except MissingField as error:
            raise self._missing_field(error) from error

    def _make_batch(self, groups: Sequence[Sequence[Trajectory]]) -> Batch:
        try:
            return self.collector.batch(groups)
        except MissingField as error:
            raise self._missing_field(error) from error

    def _missing_field(self, error: MissingField) -> UserError:
        return UserError(f"Recipe '{self.algorithm.config.recipe}' requires a metric that text lacks: {error}")

    def _observe_last(self) -> None:
        """Report the last batch to the collector."""
        if self._batch is not None and self.algorithm.advantage is not None:
            self.collector.observe(self._batch, self.algorithm.advantage.cpu(), self.algorithm.influence)
        self._batch = None

    def _no_usable_groups(self) -> UserError:
        reward_errors = self.env.reward_runner.pop_errors()
        reason = f"their rewards failed ({reward_errors[0]})" if reward_errors else "all rewards of a group are equal"
        return UserError(
            f"None of {MAX_EMPTY_BATCHES} batches had a usable group: {reason}; fix the reward of {self.task.name}, "
            "raise algorithm.sft_updates, or choose another recipe."
        )

    def _update_metrics(self, completed: Sequence[Trajectory]) -> None:
        """Update the metrics and print the reward errors since the last batch."""
        self._metrics = {f"rollout/{name}": value for name, value in rollout_metrics(completed).items()}
        self._metrics["rollout/tokens"] = float(self.generated)
        self.env_steps += int(sum(trajectory.metrics["turns"] for trajectory in completed))
        reward_errors = {str(error) for error in self.env.reward_runner.pop_errors()}
        for error in sorted(reward_errors)[:MAX_SHOWN_ERRORS]:
            sys.stderr.write(f"{self.task.name}, {error}\n")
        if len(reward_errors) > MAX_SHOWN_ERRORS:
            sys.stderr.write(f"{self.task.name}: and {len(reward_errors) - MAX_SHOWN_ERRORS} more\n")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of collector, generators and annotators, and counts."""
        self._observe_last()
        return {
            "collector": self.collector.state_dict(),
            "generator": self.env.generator.get_state(),
            "annotators": {name: annotator.state_dict() for name, annotator in self.annotators.items()},
            "chance": self._annotator_generator.get_state(),
            "generated": self.generated,
            "env_steps": self.env_steps,
            "prompts": len(self.pool.tasks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`; a state with another number of prompts raises a UserError."""
        found, count = state.get("prompts", self.algorithm.config.num_prompts), len(self.pool.tasks)
        if found != count:
            raise UserError(
                f"This run was saved by an earlier version with {found} prompts instead of {count} different ones; "
                "continue from its weights with init_from."
            )
        self.collector.load_state_dict(state["collector"])
        self.env.generator.set_state(state["generator"])
        self._annotator_generator.set_state(state["chance"])
        for name, annotator in self.annotators.items():
            annotator.load_state_dict(state["annotators"][name])
        self.env.generated, self._annotator_tokens, self.env_steps = int(state["generated"]), 0, int(state["env_steps"])
        return True

    def close(self) -> None:
        """Stop the reward threads."""
        super().close()
        self.env.reward_runner.close()


def training_prompts(task: TextTask, seed: int, count: int, least: int) -> list[Task]:
    """Return the first `count` training problems from `seed` with different contents.

    Tasks with fewer problems have fewer prompts, but at least `least`, some of them equal. Problems with a
    `hidden_state`, e.g. a scene, are different even if their contents are equal.
    """
    found: dict[str | int, Task] = {}
    for key in range(seed, seed + DRAWS_PER_PROMPT * count):
        problem = task.training_seed(key)
        found.setdefault(key if task.hidden_state else task.content(problem), Task(key, payload=problem))
        if len(found) == count:
            break
    prompts = {prompt.key: prompt for prompt in found.values()}
    for key in range(seed, seed + least):
        if len(prompts) < least:
            prompts.setdefault(key, Task(key, payload=task.training_seed(key)))
    return [prompts[key] for key in sorted(prompts)]


def allowed_age(algorithm: TextRecipe) -> Staleness:
    """Return the bound on the age of weights, of the settings or the recipe; an invalid bound raises a UserError."""
    if algorithm.config.staleness is not None:
        return BoundedStaleness(algorithm.config.staleness)
    try:
        return build("staleness", {**DEFAULTS, **algorithm.recipe.rollout}["staleness"])
    except ValueError as error:
        raise UserError(f"Recipe '{algorithm.config.recipe}': {error}") from error


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute means over trajectories and groups, by name.

    Only trajectories without hints, if any, and with a valid reward count for: all metrics common to them (`length`,
    `success`, `format`, `calls`, ...); `return`; `entropy` of the sampled tokens [nats]; `degenerate`, the fraction of
    groups whose rewards are all equal; and pass@k for k the size of the smallest group of at least two. All
    trajectories count for `reward_failed`, `assisted` and `continued`, the fraction that continue others.
    """
    unassisted = [trajectory for trajectory in trajectories if not trajectory.metrics["assisted"]] or trajectories
    scored = [trajectory for trajectory in unassisted if not trajectory.metrics["reward_failed"]]
    names = set[str].intersection(*(set(trajectory.metrics) for trajectory in scored))
    found = {name: fmean(trajectory.metrics[name] for trajectory in scored) for name in sorted(names)}
    for name in ("reward_failed", "assisted"):
        found[name] = fmean(trajectory.metrics[name] for trajectory in trajectories)
    found["continued"] = fmean(float(trajectory.task.prefix is not None) for trajectory in trajectories)
    found["return"] = fmean(trajectory.reward for trajectory in scored)
    entropy = sum(float(trajectory.decisions.require("entropy").sum()) for trajectory in scored)
    found["entropy"] = entropy / max(sum(trajectory.metrics["length"] for trajectory in scored), 1.0)
    groups = [group for group in group_by_task(scored) if len(group) > 1]
    if groups:
        found["degenerate"] = fmean(float(degenerate(rewards_of(group))) for group in groups)
        k = min(map(len, groups))
        wins = torch.tensor([sum(trajectory.metrics["success"] > 0 for trajectory in group) for group in groups])
        found[f"pass_at_{k}"] = float(pass_at_k(wins, torch.tensor([len(group) for group in groups]), k).mean())
    return found


class AsyncTextRolloutSource(TextRolloutSource):
    """Rollouts during training, by copies of the policy with weights of bounded age (AsyncFlow, Han et al. 2025).

    Batches are at most as old as `allowed_age`. The recorded log-probabilities belong to the weights that sampled the
    tokens, so the recipe's ratios and bounds account for the difference. One copy runs in a second thread, or
    `algorithm.num_workers` copies run in processes and share the groups of an update. The order of results varies, so a
    resumed run collects new rollouts.
    """

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, algorithm, seed=seed)
        self._worker_policy = frozen_copy(algorithm.policy)
        self.env = self._env(self._worker_policy)
        self._remote: list[RemoteRolloutEnv] = []
        self._workers: RolloutWorkers | None = None  # started at the first batch, after a resume has loaded weights
        count = algorithm.config.prompts_per_update
        self.queue = RolloutQueue(allowed_age(algorithm), count, max_dropped=MAX_EMPTY_BATCHES * count)

    def _start(self) -> RolloutWorkers:
        config = self.algorithm.config
        if not config.num_workers:
            envs: list[tuple[RolloutEnv, Callable[[Any], Any]]] = [(self.env, self._load)]
            return RolloutWorkers(self.queue, self.collector.collect_groups, envs, chunk=config.prompts_per_update)
        options = {"count": config.num_workers, "backend": config.worker_backend, "seed": self.seed}
        self._remote = start_workers(self.algorithm.policy, self.task.name, self.env, **options)
        chunk = max(1, config.prompts_per_update // config.num_workers)
        envs = [(env, env.load) for env in self._remote]
        return RolloutWorkers(self.queue, self.collector.collect_groups, envs, chunk=chunk)

    def _load(self, weights: bytes) -> None:
        self._worker_policy.load_state_dict(load(weights))

    def next(self, algorithm: Algorithm) -> Decisions:
        """Publish the weights of the last update, and return the oldest groups that are recent enough."""
        self._observe_last()
        if self._workers is None:
            self.queue.version, self.queue.weights = algorithm.updates, packed_weights(self.algorithm.policy)
            self._workers = self._start()
        elif algorithm.updates > self.queue.version:
            self.queue.publish(packed_weights(self.algorithm.policy))
        self._batch = self._make_batch(self._take_groups())
        self.env.completed.clear()
        self._update_metrics(self._batch.trajectories)  # excludes trajectories of `env` in flight
        age = [float(algorithm.updates - trajectory.version) for trajectory in self._batch.trajectories]
        self._metrics["rollout/staleness"] = fmean(age)
        self._metrics["rollout/stale_dropped"] = float(self.queue.stale)
        return self._annotate(self._batch)

    def _take_groups(self) -> list[list[Trajectory]]:
        try:
            return self.queue.get(self.algorithm.config.prompts_per_update)
        except RuntimeError as error:
            if isinstance(error.__cause__, NoUsableGroupsError):
                raise self._no_usable_groups() from error
            if isinstance(error.__cause__, UserError):  # e.g. a recipe requires a capability that these workers lack
                raise error.__cause__ from error
            if isinstance(error.__cause__, MissingField):
                raise self._missing_field(error.__cause__) from error
            raise

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore counts and samplers; groups in flight are collected again with different results."""
        super().load_state_dict(state)
        return False

    def close(self) -> None:
        """Stop threads and processes."""
        if self._workers is not None:
            self._workers.stop()
        for env in self._remote:
            env.close()
        super().close()
