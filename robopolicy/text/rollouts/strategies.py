"""Rollout strategies: independent rollouts, or branches at uncertain turns.

A strategy returns exactly `task.budget` trajectories per task, adjacent to each other, so that methods are compared at
equal cost. Exceptions are documented in their classes (`Paraphrased`, `PartialRollout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from robopolicy.constraints import Fraction, PositiveInt, Seed
from robopolicy.core.decisions import Decisions
from robopolicy.plugins import Registry
from robopolicy.text.rollouts.protocols import RolloutEnv, RolloutStrategy, Task, Trajectory, require_capability


class Independent(RolloutStrategy):
    """Independent rollouts."""

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out all tasks in one call."""
        return env.rollout([task for task in tasks for _ in range(task.budget)])


class RandomStrategy(RolloutStrategy):
    """Base class of strategies with a random generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> float:
        """Draw a number in [0, 1)."""
        return float(torch.rand((), generator=self._generator))

    def state_dict(self) -> dict[str, Any]:
        """Return the generator state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])


class Branch(RandomStrategy):
    """Branching where the policy becomes uncertain: part of the budget continues other rollouts.

    Source: ARPO, Dong et al. 2025.

    A fraction `initial` of the budget is rolled out first. The mean entropy of each unit is compared with the first
    unit; if `uniform - weight * rise <= threshold`, `beam - 1` rollouts branch off, until the budget is spent. The rest
    of the budget is rolled out from the start. Shared beginnings are decisions of every branch. In contrast to the
    source, branches do not branch again, and the entropy covers all tokens, not only the ten likeliest.
    """

    def __init__(
        self,
        initial: Fraction = 0.5,
        beam: PositiveInt = 2,
        weight: float = 0.2,
        threshold: float = 0.5,
        seed: Seed = 0,
    ) -> None:
        """Store the options.

        Args:
            initial: Fraction of the budget rolled out from the start; 1: no branches.
            beam: Continuations of an uncertain turn, including the first rollout.
            weight: Factor of the rise of the entropy [1/nat].
            threshold: A turn branches below this value.
            seed: Seed of the random numbers.
        """
        super().__init__(seed)
        self.initial, self.beam, self.weight, self.threshold = initial, beam, weight, threshold

    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Roll out some tasks from the start, then branches."""
        firsts = [max(1, round(self.initial * task.budget)) for task in tasks]
        completed = env.rollout([task for task, count in zip(tasks, firsts, strict=True) for _ in range(count)])
        groups: list[list[Trajectory]] = []
        more: list[Task] = []
        for task, count in zip(tasks, firsts, strict=True):
            groups.append(completed[:count])
            completed = completed[count:]
            more += self._continuations(task, groups[-1], task.budget - count, env)
        branches = env.rollout(more)
        for task, group in zip(tasks, groups, strict=True):
            missing = task.budget - len(group)
            group += branches[:missing]
            branches = branches[missing:]
        return [trajectory for group in groups for trajectory in group]

    def _continuations(self, task: Task, group: Sequence[Trajectory], room: int, env: RolloutEnv) -> list[Task]:
        """Return `room` tasks that continue rollouts of the group, or restart if too few turns are uncertain."""
        found: list[Task] = []
        for trajectory in group:
            entropy = unit_entropy(trajectory.decisions)
            for unit in range(1, len(entropy)):
                rise = entropy[unit] - entropy[0]
                if len(found) < room and self.uniform() - self.weight * rise <= self.threshold:
                    continued = require_capability(env, "branch")(trajectory, unit)
                    found += [continued] * min(self.beam - 1, room - len(found))
        return found + [task] * (room - len(found))


def unit_entropy(decisions: Decisions) -> list[float]:
    """Compute the mean entropy of each unit, in order, without masked decisions."""
    entropy, valid = decisions.require("entropy"), decisions.valid()
    unit = decisions.require("unit")
    return [float(entropy[(unit == number) & valid].mean()) for number in unit[valid].unique().tolist()]


STRATEGIES: Registry[type[RolloutStrategy]] = Registry("parts.strategy", {"independent": Independent, "branch": Branch})
