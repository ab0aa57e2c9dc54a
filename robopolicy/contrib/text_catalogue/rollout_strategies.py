"""Rollout strategies: trees, prefixes from data, hints, rewritten tasks, modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from robopolicy.constraints import Fraction, NonNegative, PositiveInt, Seed
from robopolicy.text.rollouts.protocols import (
    HINTED,
    RolloutEnv,
    RolloutStrategy,
    Task,
    Trajectory,
    require_capability,
    require_metric,
)
from robopolicy.text.rollouts.strategies import Independent, RandomStrategy
from robopolicy.text.rollouts.trajectories import group_by_task
from robopolicy.text.task import TextTask


class Tree(RandomStrategy):
    """Tree of rollouts: `width` continuations of every unit for `depth` units, then complete rollouts.

    Source: DialTree, Guo et al. 2025.

    Branches with a positive `prune` metric (off-topic, malformed, unsafe) are pruned unless all are. Leaves beyond the
    budget are dropped at random, missing leaves are rolled out from the start. Width 1 is independent.
    """

    def __init__(
        self, width: PositiveInt = 4, depth: PositiveInt = 5, prune: str | None = None, seed: Seed = 0
    ) -> None:
        """Validate and store the options.

        Args:
            width: Continuations of each unit.
            depth: Units that branch.
            prune: Metric of rollouts to prune; None: no pruning.
            seed: Seed of the draws.
        """
        super().__init__(seed)
        self.width, self.depth, self.prune = width, depth, prune

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out each task, one unit of all branches at a time."""
        return [trajectory for task in tasks for trajectory in self._leaves(env, task)]

    def _is_kept(self, trajectory: Trajectory) -> bool:
        return self.prune is None or require_metric(trajectory.metrics, self.prune, "strategy") <= 0

    def _leaves(self, env: RolloutEnv, task: Task) -> list[Trajectory]:
        frontier = [task] * max(1, task.budget // self.width**self.depth)
        leaves: list[Trajectory] = []
        for unit in range(1, self.depth + 1):
            rollouts = env.rollout([branch for branch in frontier for _ in range(self.width)], units=1)
            valid = [trajectory for trajectory in rollouts if self._is_kept(trajectory)]
            kept = self._thinned(valid or rollouts, task.budget - len(leaves))
            leaves += [trajectory for trajectory in kept if trajectory.finished]
            unfinished = [trajectory for trajectory in kept if not trajectory.finished]
            frontier = [require_capability(env, "branch")(trajectory, unit) for trajectory in unfinished]
        leaves += env.rollout([*frontier, *[task] * (task.budget - len(leaves) - len(frontier))])
        return leaves

    def _thinned(self, trajectories: list[Trajectory], most: int) -> list[Trajectory]:
        if len(trajectories) <= most:
            return trajectories
        chosen = torch.randperm(len(trajectories), generator=self._generator)[:most].sort().values
        return [trajectories[index] for index in chosen.tolist()]


class ResetFromData(RandomStrategy):
    """Rollouts start in the middle of a demonstration with probability `share` (DR-PO, Chang et al. 2024).

    The length of the prefix is uniform and drawn once per task, so that a group starts from one state. Tokens of the
    prefix are not decisions. A share of 0 is independent.
    """

    def __init__(self, share: Fraction = 1.0, seed: Seed = 0) -> None:
        super().__init__(seed)
        self.share = share

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out independently after the prefixes."""
        return Independent().rollout(env, [self._started(env, task) for task in tasks])

    def _started(self, env: RolloutEnv, task: Task) -> Task:
        sample, length = self.uniform(), self.uniform()
        started = require_capability(env, "start_from_solution")(task, length) if sample < self.share else None
        return task if started is None else started


class AdaptiveHints(RandomStrategy):
    """Prefixes of the solution for half of a group, longer if the other half fails.

    Source: Zhang et al. 2025.

    The share is `low + (high - low) (1 - p) + noise`, p the success rate of the plain half; the
    task is unchanged if it is at most 0. Tokens of the prefix are masked.
    """

    def __init__(
        self, low: NonNegative = 0.0, high: NonNegative = 0.8, noise: NonNegative = 0.05, seed: Seed = 0
    ) -> None:
        """Validate and store the options.

        Args:
            low: Share of the solution if the plain half succeeds.
            high: Share of the solution if it fails.
            noise: Half-width of the uniform noise on the share.
            seed: Seed of the noise.
        """
        super().__init__(seed)
        self.low, self.high, self.noise = low, high, noise

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out the plain halves, which determine the length of the prefixes, then the other halves."""
        plain = Independent().rollout(env, [replace(task, budget=task.budget - task.budget // 2) for task in tasks])
        assisted: list[Task] = []
        for task, group in zip(tasks, group_by_task(plain), strict=True):
            rate = sum(trajectory.success for trajectory in group) / len(group)
            share = self.low + (self.high - self.low) * (1.0 - rate) + self.noise * (2.0 * self.uniform() - 1.0)
            hinted = require_capability(env, "start_from_solution")(task, min(share, 1.0)) if share > 0 else None
            assisted += [task if hinted is None else hinted] * (task.budget // 2)
        hinted_rollouts = [
            replace(trajectory, source=HINTED) if trajectory.task.prefix is not None else trajectory
            for trajectory in env.rollout(assisted)
        ]
        return side_by_side(plain, hinted_rollouts)


class Paraphrased(RolloutStrategy):
    """Paraphrased tasks (CLPO, Zhang et al. 2025): simpler for failed tasks, varied for half-solved ones.

    Paraphrases have their own keys and groups, in addition to the original tasks and their budget.
    """

    def __init__(self, hard: Fraction = 0.3, easy: Fraction = 0.7) -> None:
        """Validate and store the options.

        Args:
            hard: Success rate up to which a simpler paraphrase is used.
            easy: Success rate up to which a varied paraphrase is used.
        """
        self.hard, self.easy = hard, easy

    def check(self, task: Any) -> None:
        """Check that a text task can paraphrase its problems."""
        if isinstance(task, TextTask) and type(task).paraphrase is TextTask.paraphrase:
            raise ValueError(f"task {task.name} cannot paraphrase its problems; choose another recipe or task.")

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out the original tasks, then paraphrases of tasks that are not easy."""
        trajectories = Independent().rollout(env, tasks)
        again: list[Task] = []
        for task, group in zip(tasks, group_by_task(trajectories), strict=True):
            rate = sum(trajectory.success for trajectory in group) / len(group)
            if rate <= self.easy:
                again.append(require_capability(env, "rewrite")(task, "simpler" if rate <= self.hard else "varied"))
        return trajectories + Independent().rollout(env, again)


class Privileged(RolloutStrategy):
    """Rollouts of part of a group with a document that is missing at deployment (TriMPI, Wang et al. 2025).

    The trajectories are assigned to the plain task: scored without the document, `logp_behaviour` with it.
    A share of 0 is independent.
    """

    def __init__(self, share: Fraction = 0.5, kind: str = "document") -> None:
        """Validate and store the options.

        Args:
            share: Fraction of the budget with the document.
            kind: Kind of hint.
        """
        self.share, self.kind = share, kind

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out without the document, then with it."""
        counts = [round(self.share * task.budget) for task in tasks]
        plain = Independent().rollout(
            env, [replace(t, budget=t.budget - n) for t, n in zip(tasks, counts, strict=True)]
        )
        requests = [task for task, count in zip(tasks, counts, strict=True) for _ in range(count)]
        if not requests:
            return plain
        hinted = [require_capability(env, "hint")(task, self.kind, 1.0) or task for task in requests]
        assisted = require_capability(env, "rescore")(env.rollout(hinted), requests)
        return side_by_side(plain, [replace(trajectory, source=HINTED) for trajectory in assisted])


class PromptModes(RolloutStrategy):
    """A fixed fraction of every group in each mode, given in the context; the reward includes their costs.

    Source: A2FM, Chen et al. 2025.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        self.modes = tuple(modes)

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Cycle through the modes until the budget is spent."""
        return env.rollout(
            [
                replace(task, context={"kind": "mode", "text": self.modes[number % len(self.modes)]})
                for task in tasks
                for number in range(task.budget)
            ]
        )


class Resample(RolloutStrategy):
    """Resampling of rollouts with low critic values (ReAd, Zhang et al. 2024); the best one is kept.

    The critic is a metric of the environment. The cost is up to `queries` rollouts per returned trajectory.
    """

    def __init__(self, metric: str = "advantage", threshold: float = 0.0, queries: PositiveInt = 3) -> None:
        """Validate and store the options.

        Args:
            metric: Metric with the critic's value.
            threshold: Values above it are accepted; -.inf accepts all.
            queries: Maximum rollouts per returned trajectory.
        """
        self.metric, self.threshold, self.queries = metric, threshold, queries

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Return accepted rollouts, or the best of the queries."""
        trajectories = env.rollout([task for task in tasks for _ in range(task.budget)])
        for _ in range(self.queries - 1):
            places = [
                place for place, trajectory in enumerate(trajectories) if self._value(trajectory) <= self.threshold
            ]
            if not places:
                break
            for place, again in zip(places, env.rollout([trajectories[place].task for place in places]), strict=True):
                if self._value(again) > self._value(trajectories[place]):
                    trajectories[place] = again
        return trajectories

    def _value(self, trajectory: Trajectory) -> float:
        return require_metric(trajectory.metrics, self.metric, "strategy")


def side_by_side(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> list[Trajectory]:
    """Merge trajectories by group."""
    return [trajectory for group in group_by_task([*first, *second]) for trajectory in group]
