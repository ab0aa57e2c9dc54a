"""Interventions on groups without a learning signal: hints, teachers, replays, repairs, or dropping them.

Rewards come from the environment, before any reward part. Groups to which the intervention does not apply and
trajectories that are not replaced are unchanged. A replacement has its own `source`, its own task and the
log-probabilities it was sampled with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, NonNegativeInt, PositiveInt, Seed
from robopolicy.text.rollouts.protocols import (
    HINTED,
    REPAIRED,
    REPLAYED,
    Intervention,
    RolloutEnv,
    Trajectory,
    degenerate,
    require_capability,
    require_metric,
    rewards_of,
)
from robopolicy.text.rollouts.trajectories import from_dict, to_dict


class OnFailure(Intervention):
    """Base class of interventions on groups without a success."""

    def applies(self, rewards: Tensor) -> bool:
        """Whether all rollouts failed."""
        return failed(rewards)


class Drop(Intervention):
    """Removal of groups with equal rewards (DAPO); with `max_resample_rounds`, the collector samples replacements."""

    def applies(self, rewards: Tensor) -> bool:
        """Whether all rewards are equal."""
        return degenerate(rewards)

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Return no trajectories."""
        return []


class Hint(OnFailure):
    """Resampling of the whole group with a growing part of the reference solution (GHPO, Liu et al. 2025)."""

    def __init__(self, shares: Sequence[NonNegative] = (0.25, 0.5, 0.75), kind: str = "solution") -> None:
        """Validate and store the options.

        Args:
            shares: Shares of the solution, in order until a rollout succeeds; the last group is always kept.
            kind: Kind of hint.
        """
        self.shares, self.kind = tuple(shares), kind

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Return the first group with a success, or the group with the last hint."""
        rollouts = list(group)
        for share in self.shares:
            hinted = require_capability(env, "hint")(group[0].task, self.kind, share)
            if hinted is None:
                return list(group)
            rollouts = [replace(trajectory, source=HINTED) for trajectory in env.rollout([hinted] * len(group))]
            if not failed(rewards_of(rollouts)):
                break
        return rollouts


class GradedHints(OnFailure):
    """Replacement of one failure by a rollout with the smallest hint that solves the task.

    Source: Scaf-GRPO, Zhang et al. 2025.

    Hints grow by kind and level. The trajectory keeps its hint, or with `relabel` belongs to the plain task and is
    scored without the hint.
    """

    def __init__(
        self,
        kinds: Sequence[str] = ("knowledge", "plan", "solution"),
        levels: PositiveInt = 4,
        warmup: NonNegativeInt = 50,
        relabel: bool = False,
    ) -> None:
        """Validate and store the options.

        Args:
            kinds: Kinds of hints, smallest first.
            levels: Equal shares of each kind.
            warmup: Batches before the first hint.
            relabel: Assign the trajectory to the plain task.
        """
        self.kinds, self.levels, self.warmup, self.relabel = tuple(kinds), levels, warmup, relabel
        self.batches = 0

    def applies(self, rewards: Tensor) -> bool:
        """Whether all failed, after the warm-up."""
        return self.batches >= self.warmup and failed(rewards)

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Replace at most one trajectory."""
        plain = group[0].task
        for kind in self.kinds:
            for level in range(1, self.levels + 1):
                hinted = require_capability(env, "hint")(plain, kind, level / self.levels)
                if hinted is None:
                    break
                (trajectory,) = env.rollout([hinted])
                if trajectory.success:
                    if self.relabel:
                        (trajectory,) = require_capability(env, "rescore")([trajectory], [plain])
                    return [replace(trajectory, source=HINTED), *group[1:]]
        return list(group)

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Count a batch."""
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.batches = int(state["batches"])


class Teacher(OnFailure):
    """Replacement of failures by up to `count` teacher rollouts (AMPO, Yuan et al. 2025)."""

    def __init__(self, count: PositiveInt = 2) -> None:
        self.count = count

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Replace the first trajectories."""
        taught = require_capability(env, "teach")(group[0].task, min(self.count, len(group)))
        return [*taught, *group[len(taught) :]]


class Demonstration(Intervention):
    """Replacement of groups with at most `gate` successes by demonstrations: imitation where RL has no signal.

    Source: HPT, Lv et al. 2025.

    A gate of -1 is pure RL, a gate of the group size pure imitation.
    """

    def __init__(self, gate: NonNegativeInt = 0, count: PositiveInt = 1) -> None:
        self.gate, self.count = gate, count

    def applies(self, rewards: Tensor) -> bool:
        """Whether there are at most `gate` successes."""
        return int((rewards > 0.5).sum()) <= self.gate

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Return demonstrations, or the group if there are none."""
        return require_capability(env, "teach")(group[0].task, self.count) or list(group)


class SelfCorrect(Intervention):
    """Replacement of failures by self-corrected rollouts.

    Source: FATE, Yin et al. 2026; Search-R2, He et al. 2026; reflection of R3, Jiang et al. 2026.

    A repair replaces its failure if it is better in one of the `objectives` and not dominated. It keeps its own task,
    with the failure in the context.
    """

    def __init__(self, count: PositiveInt = 1, objectives: Sequence[str] = ()) -> None:
        """Validate and store the options.

        Args:
            count: Maximum number of repairs per group.
            objectives: Metrics, higher is better; none: the reward.
        """
        self.count, self.objectives = count, tuple(objectives)

    def applies(self, rewards: Tensor) -> bool:
        """Whether a rollout failed."""
        return bool((rewards <= 0.5).any())

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Replace failures by improved trajectories."""
        places = [place for place, trajectory in enumerate(group) if not trajectory.success][: self.count]
        requests = [require_capability(env, "repair")(group[place]) for place in places]
        result = list(group)
        for place, repaired in zip(places, env.rollout(requests), strict=True):
            if self._better(repaired, group[place]):
                result[place] = replace(repaired, source=REPAIRED)
        return result

    def _better(self, repaired: Trajectory, failure: Trajectory) -> bool:
        if not self.objectives:
            return repaired.reward > failure.reward
        after, before = (
            [require_metric(trajectory.metrics, name, "intervention") for name in self.objectives]
            for trajectory in (repaired, failure)
        )
        gains = [new - old for new, old in zip(after, before, strict=True)]
        return max(gains) > 0 and not dominates([-gain for gain in gains])


class ReplayTrajectories(Intervention):
    """Replacement of one failure by a stored success of the same task (ARPO for GUIs, Lu et al. 2025)."""

    def __init__(self, size: PositiveInt = 8, keep: float = 0.1, spread: NonNegative = 0.05, mean: float = 0.2) -> None:
        """Validate and store the options.

        Args:
            size: Stored trajectories per task, first in first out.
            keep: Reward above which a trajectory is stored.
            spread: Standard deviation of rewards below which the intervention applies.
            mean: Mean reward below which it is.
        """
        self.size, self.keep, self.spread, self.mean = size, keep, spread, mean
        self._stored: dict[int, deque[Trajectory]] = {}

    def applies(self, rewards: Tensor) -> bool:
        """Whether rewards are low and nearly equal."""
        return float(rewards.std(unbiased=False)) < self.spread and float(rewards.mean()) < self.mean

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Replace the first trajectory by the latest stored success."""
        stored = self._stored.get(group[0].task.key)
        if not stored:
            return list(group)
        return [replace(stored[-1], source=REPLAYED), *group[1:]]

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Store trajectories with a high reward that were not replayed."""
        for group in groups:
            for trajectory in group:
                if trajectory.reward > self.keep and trajectory.source != REPLAYED:
                    self._stored.setdefault(trajectory.task.key, deque(maxlen=self.size)).append(trajectory)

    def state_dict(self) -> dict[str, Any]:
        """Return the stored trajectories."""
        return {"stored": [[to_dict(trajectory) for trajectory in stored] for stored in self._stored.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        groups = [[from_dict(item) for item in stored] for stored in state["stored"]]
        self._stored = {group[0].task.key: deque(group, maxlen=self.size) for group in groups}


class SampleBuffer(Intervention):
    """Replacement of groups with equal rewards by earlier groups (Skywork R1V2, Wang et al. 2025).

    Stored groups of at most `age` batches are drawn in proportion to their mean |reward - mean|, without replacement.
    """

    def __init__(self, size: PositiveInt = 256, age: PositiveInt = 8, seed: Seed = 0) -> None:
        """Validate and store the options.

        Args:
            size: Stored groups, first in first out.
            age: Batches after which a group is dropped.
            seed: Seed of the draws.
        """
        self.size, self.age = size, age
        self._generator = torch.Generator().manual_seed(seed)
        self._stored: list[tuple[int, list[Trajectory]]] = []  # batch, group
        self.batches = 0

    def applies(self, rewards: Tensor) -> bool:
        """Whether all rewards are equal."""
        return degenerate(rewards)

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Return a stored group if there is one."""
        if not self._stored:
            return list(group)
        weight = torch.stack(
            [(rewards_of(stored) - rewards_of(stored).mean()).abs().mean() for _, stored in self._stored]
        )
        place = int(torch.multinomial(weight, 1, generator=self._generator))
        return [replace(trajectory, source=REPLAYED) for trajectory in self._stored.pop(place)[1]]

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Store new groups with different rewards, drop old ones."""
        self.batches += 1
        for group in groups:
            fresh = all(trajectory.source != REPLAYED for trajectory in group)
            if fresh and not degenerate(rewards_of(group)):
                self._stored.append((self.batches, list(group)))
        self._stored = [item for item in self._stored if self.batches - item[0] < self.age][-self.size :]

    def state_dict(self) -> dict[str, Any]:
        """Return the stored groups, their ages, and the generator."""
        stored = [[batch, [to_dict(trajectory) for trajectory in group]] for batch, group in self._stored]
        return {"stored": stored, "batches": self.batches, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._stored = [(int(batch), [from_dict(item) for item in group]) for batch, group in state["stored"]]
        self.batches = int(state["batches"])
        self._generator.set_state(state["generator"])


def dominates(gains: Sequence[float]) -> bool:
    """Whether no gain is negative and one is positive."""
    return min(gains) >= 0 and max(gains) > 0


def failed(rewards: Tensor, threshold: float = 0.5) -> bool:
    """Whether no reward of a group `(G,)` exceeds the threshold of success."""
    return bool((rewards <= threshold).all())
