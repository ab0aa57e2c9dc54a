"""Rollout strategies: trees, prefixes from data, hints, rewritten tasks, modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from robopolicy.constraints import Fraction, NonNegative, PositiveInt, Seed
from robopolicy.text.rollouts.protocols import HINTED, Attempt, Task, Topology, World, able, need_metric
from robopolicy.text.rollouts.strategies import Flat, Random
from robopolicy.text.rollouts.trajectories import groups_of
from robopolicy.text.task import TextTask


class Tree(Random):
    """Every unit of every branch is tried `width` times, for `depth` units; then each is played out.

    Where a metric of this name is positive (off-topic, malformed, unsafe), a branch is pruned unless all would be. More
    leaves than the budget are thinned at random, missing ones are played from the start. One branch per unit is flat.
    Source: Guo et al. 2025, DialTree.
    """

    def __init__(
        self, width: PositiveInt = 4, depth: PositiveInt = 5, prune: str | None = None, seed: Seed = 0
    ) -> None:
        """Validate and store the options.

        Args:
            width: Continuations of each unit.
            depth: Units that branch.
            prune: Metric of attempts that are not continued.
            seed: Of the draws.
        """
        super().__init__(seed)
        self.width, self.depth, self.prune = width, depth, prune

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Task by task, a unit of all branches at a time."""
        return [attempt for task in tasks for attempt in self._leaves(world, task)]

    def _sound(self, attempt: Attempt) -> bool:
        return self.prune is None or need_metric(attempt.metrics, self.prune, "topology") <= 0

    def _leaves(self, world: World, task: Task) -> list[Attempt]:
        frontier = [task] * max(1, task.budget // self.width**self.depth)
        leaves: list[Attempt] = []
        for unit in range(1, self.depth + 1):
            tried = world.play([branch for branch in frontier for _ in range(self.width)], units=1)
            sound = [attempt for attempt in tried if self._sound(attempt)]
            kept = self._thinned(sound or tried, task.budget - len(leaves))
            leaves += [attempt for attempt in kept if attempt.finished]
            open_ends = [attempt for attempt in kept if not attempt.finished]
            frontier = [able(world, "branch")(attempt, unit) for attempt in open_ends]
        leaves += world.play([*frontier, *[task] * (task.budget - len(leaves) - len(frontier))])
        return leaves

    def _thinned(self, attempts: list[Attempt], most: int) -> list[Attempt]:
        if len(attempts) <= most:
            return attempts
        chosen = torch.randperm(len(attempts), generator=self._generator)[:most].sort().values
        return [attempts[index] for index in chosen.tolist()]


class ResetFromData(Random):
    """Attempts begin in the middle of a demonstration with probability `share` (DR-PO, Chang et al. 2024).

    The length of its prefix is uniform, and one per task, so that a group starts from one state. What is given is not a
    decision of the policy. A share of 0 is flat.
    """

    def __init__(self, share: Fraction = 1.0, seed: Seed = 0) -> None:
        super().__init__(seed)
        self.share = share

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Flat, from where the demonstrations lead."""
        return Flat().rollout(world, [self._started(world, task) for task in tasks])

    def _started(self, world: World, task: Task) -> Task:
        chance, length = self.uniform(), self.uniform()
        started = able(world, "begin")(task, length) if chance < self.share else None
        return task if started is None else started


class AdaptiveHints(Random):
    """Half of a group is played with the beginning of a reference solution, longer where the other half fails.

    The share is `low + (high - low) (1 - p) + noise`, p the success rate of the plain half; a share of at most 0 leaves
    the task as it is. The given decisions are masked. Source: Zhang et al. 2025, ADHint.
    """

    def __init__(
        self, low: NonNegative = 0.0, high: NonNegative = 0.8, noise: NonNegative = 0.05, seed: Seed = 0
    ) -> None:
        """Validate and store the options.

        Args:
            low: Share of the solution given where the plain half succeeds.
            high: Share given where it fails.
            noise: Half-width of the uniform noise on the share.
            seed: Of the noise.
        """
        super().__init__(seed)
        self.low, self.high, self.noise = low, high, noise

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Roll out the plain halves first, because they determine the length of the hints."""
        plain = Flat().rollout(world, [replace(task, budget=task.budget - task.budget // 2) for task in tasks])
        helped: list[Task] = []
        for task, group in zip(tasks, groups_of(plain), strict=True):
            rate = sum(attempt.success for attempt in group) / len(group)
            share = self.low + (self.high - self.low) * (1.0 - rate) + self.noise * (2.0 * self.uniform() - 1.0)
            hinted = able(world, "begin")(task, min(share, 1.0)) if share > 0 else None
            helped += [task if hinted is None else hinted] * (task.budget // 2)
        told = [
            replace(attempt, source=HINTED) if attempt.task.prefix is not None else attempt
            for attempt in world.play(helped)
        ]
        return side_by_side(plain, told)


class Rewritten(Topology):
    """Tasks restated by how they went: failed ones simpler, half-solved ones varied, plus the originals.

    The restatements have keys, and so groups, of their own and come on top of the budget. With `hard` below 0 and an
    empty middle nothing is restated. Source: Zhang et al. 2025, CLPO.
    """

    def __init__(self, hard: Fraction = 0.3, easy: Fraction = 0.7) -> None:
        """Validate and store the options.

        Args:
            hard: Success rate up to which a task is restated simpler.
            easy: Success rate up to which it is varied.
        """
        self.hard, self.easy = hard, easy

    def check(self, task: Any) -> None:
        """Refuse a text task that cannot restate its problems."""
        if isinstance(task, TextTask) and type(task).restated is TextTask.restated:
            raise ValueError(f"task {task.name} cannot restate its problems; choose another recipe or task.")

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """The originals, then restatements of those that were not easy."""
        attempts = Flat().rollout(world, tasks)
        again: list[Task] = []
        for task, group in zip(tasks, groups_of(attempts), strict=True):
            rate = sum(attempt.success for attempt in group) / len(group)
            if rate <= self.easy:
                again.append(able(world, "rewrite")(task, "simpler" if rate <= self.hard else "varied"))
        return attempts + Flat().rollout(world, again)


class Privileged(Topology):
    """Rolls out part of a group with a document that the policy will not have later (TriMPI, Wang et al. 2025).

    Its attempts join the group as answers to the plain task: scored without the document, `logp_behaviour` with it. A
    share of 0 is flat.
    """

    def __init__(self, share: Fraction = 0.5, kind: str = "document") -> None:
        """Validate and store the options.

        Args:
            share: Fraction of the budget with the document.
            kind: Kind of hint.
        """
        self.share, self.kind = share, kind

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Roll out the plain ones, then those with the document."""
        counts = [round(self.share * task.budget) for task in tasks]
        plain = Flat().rollout(world, [replace(t, budget=t.budget - n) for t, n in zip(tasks, counts, strict=True)])
        asked = [task for task, count in zip(tasks, counts, strict=True) for _ in range(count)]
        if not asked:
            return plain
        told = [able(world, "hint")(task, self.kind, 1.0) or task for task in asked]
        helped = able(world, "rescore")(world.play(told), asked)
        return side_by_side(plain, [replace(attempt, source=HINTED) for attempt in helped])


class PromptModes(Topology):
    """A fixed fraction of every group in each mode, given in the context; the reward has the costs.

    Source: Chen et al. 2025, A2FM.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        self.modes = tuple(modes)

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """Mode after mode, over and over until the budget is spent."""
        return world.play(
            [
                replace(task, context={"kind": "mode", "text": self.modes[number % len(self.modes)]})
                for task in tasks
                for number in range(task.budget)
            ]
        )


class Resample(Topology):
    """Resamples rollouts with low critic values (ReAd, Zhang et al. 2024) and keeps the best one.

    The critic is a metric of the world. The cost is up to `queries` attempts for each that is returned.
    """

    def __init__(self, metric: str = "advantage", threshold: float = 0.0, queries: PositiveInt = 3) -> None:
        """Validate and store the options.

        Args:
            metric: What the critic says of an attempt.
            threshold: Above it an attempt is accepted; -.inf accepts all.
            queries: Most attempts at one place.
        """
        self.metric, self.threshold, self.queries = metric, threshold, queries

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """As many as the budgets sum to, accepted or the best that there were."""
        attempts = world.play([task for task in tasks for _ in range(task.budget)])
        for _ in range(self.queries - 1):
            places = [place for place, attempt in enumerate(attempts) if self._value(attempt) <= self.threshold]
            if not places:
                break
            for place, again in zip(places, world.play([attempts[place].task for place in places]), strict=True):
                if self._value(again) > self._value(attempts[place]):
                    attempts[place] = again
        return attempts

    def _value(self, attempt: Attempt) -> float:
        return need_metric(attempt.metrics, self.metric, "topology")


def side_by_side(first: Sequence[Attempt], second: Sequence[Attempt]) -> list[Attempt]:
    """Attempts of both, group by group."""
    return [attempt for group in groups_of([*first, *second]) for attempt in group]
