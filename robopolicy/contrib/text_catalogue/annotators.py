"""Annotators of single recipes.

extra["mean_ref"] (N,)          mean reward of rollouts of the initial policy at the task (Baheti et al. 2023)
extra["value_ref"] (N,)         best value of the task, beta log mean exp(R / beta), by the initial policy (A*-PO)
extra["likelihood"] (N,)        likelihood of the task's solution under the initial policy (Nguyen et al. 2025)
value, extra["rollout_value"] (N, T)    mean return of rollouts that continue from each response (Yu et al. 2026)
value, unit (N, T)              the same from each segment of a response, and the index of the segment (Guo et al. 2025)
extra["probe_accuracy"], extra["probe_confidence"] (N, T)   of the solution before each response (Wu et al. 2026)
extra["duration"] (N, T)        tokens of each response, a proxy for its time (Yang et al. 2025)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from robopolicy.contrib.text_catalogue.env_capabilities import final_message
from robopolicy.core.decisions import Decisions
from robopolicy.core.segments import Segments
from robopolicy.errors import UserError
from robopolicy.text.annotators import (
    AnnotatorEnvs,
    PerTaskAnnotator,
    RolloutAnnotator,
    named_parts,
    plain,
    rewards,
    with_extra,
)
from robopolicy.text.rollouts.protocols import Task, Trajectory
from robopolicy.text.text_env import TextEnv, score

SAMPLES = 8  # rollouts of the initial policy per task
BETA = 0.5  # temperature of the best value, in rewards
ROLLOUTS = 4  # rollouts from each message


class MeanValue(PerTaskAnnotator):
    """Mean return of the initial policy."""

    key, needs_initial_policy = "mean_ref", True

    def compute(self, envs: AnnotatorEnvs, tasks: Sequence[Task]) -> list[float]:
        """Roll out every task several times."""
        found = torch.tensor(rewards(envs.initial.rollout([task for task in tasks for _ in range(SAMPLES)])))
        return self.value(found.view(-1, SAMPLES)).tolist()

    def value(self, found: Tensor) -> Tensor:
        """Compute the values (M,) of tasks from rewards (M, SAMPLES)."""
        return found.mean(1)


class BestValue(MeanValue):
    """Value of the best policy near the initial policy."""

    key = "value_ref"

    def value(self, found: Tensor) -> Tensor:
        """Compute the soft maximum over the rollouts."""
        return BETA * (torch.logsumexp(found / BETA, 1) - math.log(SAMPLES))


class Likelihood(PerTaskAnnotator):
    """Likelihood of the solution under the initial policy: geometric mean over its tokens, 0 without a solution."""

    key, needs_initial_policy = "likelihood", True

    def compute(self, envs: AnnotatorEnvs, tasks: Sequence[Task]) -> list[float]:
        """Score the solutions."""
        return solutions(envs.initial, tasks)[0].tolist()


class RolloutValue(RolloutAnnotator):
    """Mean return before each response, over rollouts that continue from there."""

    key = "rollout_value"

    def __init__(self, gamma: float = 1.0) -> None:
        """Set the discount per turn."""
        self.gamma = gamma

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> Self:
        """Use the discount of the advantage source `gae`."""
        return cls(dict(named_parts(recipe)).get("gae", {}).get("gamma", 1.0))

    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Continue from every response; the prompt of a task is sampled once."""
        moments, places = cut_points(envs.current, trajectories)
        value = broadcast_values(mean_return(envs.current, moments, self.gamma), places, rows)
        return rows.with_fields(value=value) if self.key == "value" else with_extra(rows, **{self.key: value})


class GaeValue(RolloutValue):
    """`RolloutValue` as the value of decisions, for recipes without a critic."""

    key = "value"


class SegmentValue(RolloutAnnotator):
    """Mean return before each segment of a response; units become segments."""

    key = "value"

    def __init__(self, every: int, below: float) -> None:
        """Split after every `every` tokens that are less likely than `below`."""
        self.every, self.below = every, below

    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Continue from every split and response."""
        begins = segment_starts(rows, self.every, self.below)
        columns = [row.nonzero()[1:, 0].tolist() for row in begins]
        rows = rows.with_fields(unit=(begins.cumsum(1) - 1).clamp(min=0))
        moments, places = cut_points(envs.current, trajectories, columns)
        return rows.with_fields(value=broadcast_values(mean_return(envs.current, moments), places, rows))


class Probe(RolloutAnnotator):
    """Likelihood of the solution's last message before each response, and the policy's confidence in it."""

    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Score the solution before all responses."""
        moments, places = cut_points(envs.current, trajectories)
        accuracy, confidence = (broadcast_values(value, places, rows) for value in solutions(envs.current, moments))
        return with_extra(rows, probe_accuracy=accuracy, probe_confidence=confidence)


class DurationAnnotator(RolloutAnnotator):
    """Tokens of each message."""

    def __call__(self, envs: AnnotatorEnvs, trajectories: Sequence[Trajectory], rows: Decisions) -> Decisions:
        """Count the tokens."""
        row = torch.arange(len(rows))[:, None]
        messages = Segments(row * (int(rows.require("unit").max()) + 1) + rows.require("unit"), rows.valid())
        return with_extra(rows, duration=messages.broadcast(messages.count).to(rows.logp_old.dtype))


def mean_return(env: TextEnv, moments: Sequence[Task], gamma: float = 1.0) -> Tensor:
    """Compute the mean return `(M,)` of rollouts that continue from each task."""
    rollouts = env.rollout([task for task in moments for _ in range(ROLLOUTS)])
    return torch.tensor([return_to_go(trajectory, gamma) for trajectory in rollouts]).view(-1, ROLLOUTS).mean(1)


def return_to_go(trajectory: Trajectory, gamma: float = 1.0) -> float:
    """Compute the return of the turns after the prefix of the task, 0 without a valid reward."""
    if trajectory.record.reward_failed:
        return 0.0
    before = len(trajectory.task.prefix["responses"]) if trajectory.task.prefix is not None else 0
    return sum(gamma**turn * reward for turn, reward in enumerate(trajectory.record.turn_rewards[before:]))


def segment_starts(rows: Decisions, every: int, below: float) -> Tensor:
    """Mark, bool `(N, T)`, the start of responses and the token after every `every` tokens less likely than `below`."""

    def before(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)

    unit, own = rows.require("unit"), rows.valid()
    first = own & ~(before(own) & (before(unit) == unit))
    unsure = own & (rows.logp_old < math.log(below))
    count = unsure.long().cumsum(1)
    earlier = torch.where(first, count - unsure.long(), 0).cummax(1).values  # in earlier messages
    return first | (own & before(unsure & ((count - earlier) % every == 0)))


def cut_points(
    env: TextEnv, trajectories: Sequence[Trajectory], columns: Sequence[Sequence[int]] | None = None
) -> tuple[list[Task], list[list[int]]]:
    """Create tasks that continue before each response, equal prompts once, and their indices for each trajectory.

    With `columns`, they continue before these columns of each row instead of the later responses.
    """
    moments: list[Task] = []
    first: dict[int, int] = {}
    places: list[list[int]] = []
    for row, trajectory in enumerate(trajectories):
        if trajectory.record is None:
            raise UserError("This recipe continues from the middle of rollouts, which needs num_workers=0.")
        begin = first.setdefault(trajectory.task.key, len(moments))
        later = trajectory.record.turn_starts[1 : int(trajectory.metrics["turns"])] if columns is None else columns[row]
        if begin == len(moments):
            moments.append(plain(trajectory.task))
        places.append([begin, *range(len(moments), len(moments) + len(later))])
        moments += [env.continue_from(trajectory, column) for column in later]
    return moments, places


def broadcast_values(values: Tensor, places: Sequence[Sequence[int]], rows: Decisions) -> Tensor:
    """Broadcast values `(M,)` of tasks to the decisions `(N, T)` of the responses after them."""
    unit, result = rows.require("unit"), torch.zeros_like(rows.logp_old)
    for row, numbers in enumerate(places):
        result[row] = values[torch.tensor(numbers)][unit[row].clamp(max=len(numbers) - 1)].to(result)
    return result


@torch.no_grad()
def solutions(env: TextEnv, tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Score the last message of each solution: geometric mean probability, and exp of minus the mean entropy."""
    written = [final_message(env, task) for task in tasks]
    known = [place for place, trajectory in enumerate(written) if trajectory is not None]
    found = torch.zeros(2, len(tasks))
    if known:
        batch = env.batch([trajectory for trajectory in written if trajectory is not None])
        out, count = score(env.policy, batch), batch.valid().sum(1).clamp(min=1)
        for kind, values in zip(found, (out.logp, -out.entropy), strict=True):
            kind[known] = (values.cpu().sum(1) / count).exp()
    return found[0], found[1]
