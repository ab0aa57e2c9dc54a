"""Protocols of the rollout side of a recipe: tasks, trajectories, environments and the parts that work on them.

    Sampler.propose -> RolloutStrategy.rollout -> Reward -> Intervention -> batch -> core -> Sampler.observe

The parts handle texts and robot episodes in the same way; only the `RolloutEnv` differs. Everything except rollouts is
a capability of the environment ("branch", "hint", ...), requested with `require_capability`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, MissingField
from robopolicy.errors import UserError

POLICY, REPLAYED, TEACHER, HINTED, REPAIRED = range(5)
"""`Decisions.source`: sampled from the policy, replayed, sampled from a teacher, with a hint, self-corrected."""


@dataclass(frozen=True)
class Task:
    """A task to roll out. Payload, prefix and context are plain values or tensors, so that checkpoints can store them.

    A context is a mapping with its `kind` ("instruction", "mode", "repair", a kind of hint) and other inputs of the
    environment, e.g. the `text` of instructions and modes. Trajectories keep the task they were sampled with.
    """

    key: int  # prompt or start state; trajectories of one key form a group
    payload: Any = None  # prompt, or reset state of the simulator
    prefix: Any | None = None  # given decisions, after which the environment continues
    context: Any | None = None  # additional conditioning: hint, instruction, privileged observation
    temperature: float = 1.0
    budget: int = 1  # number of rollouts


@dataclass(frozen=True)
class Trajectory:
    """One rollout of a task: a completion, a dialogue or an episode.

    Its decisions are `(1, T)` for a sequence, or one row per chunk, turn or context window. `logp_old` is recorded
    during sampling and never changes; rows that are scored again store it as `logp_behaviour`.
    """

    task: Task  # including hint and prefix
    decisions: Decisions
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # inputs of rewards: calls, length, verdict
    source: int = POLICY
    version: int = 0  # of the weights it was sampled with
    finished: bool = True  # False: stopped by a limit of the strategy; can be continued
    record: Any = None  # data of the environment for grading, continuing or repairing; not in checkpoints

    @property
    def success(self) -> bool:
        """Whether the reward exceeds 0.5."""
        return self.reward > 0.5


class RolloutEnv(Protocol):
    """Environment with the policy that is trained, e.g. a text environment."""

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Roll out every task once, in order.

        Args:
            tasks: Tasks; budgets are ignored.
            units: Stop after this number of further units (turns, chunks); None: roll out to the end.
        """
        ...

    def batch(self, trajectories: Sequence[Trajectory]) -> Decisions:
        """Return the rows of all trajectories, see `trajectories.stack`."""
        ...


def require_capability(env: object, capability: str) -> Callable[..., Any]:
    """Return an optional function of an environment: a method, or an entry of its registry `capabilities`.

    For example, `branch(trajectory, unit)` returns the task that continues a trajectory after its first `unit` units,
    which remain decisions of the policy.

    Raises:
        UserError: The environment has no such function.
    """
    method = getattr(env, capability, None)
    if method is not None:
        return method
    registered: Mapping[str, Callable[..., Any]] = getattr(env, "capabilities", {})
    if capability not in registered:
        raise UserError(
            f"This recipe needs an environment with the capability '{capability}', which {type(env).__name__} lacks; "
            "choose another recipe or task."
        )
    return partial(registered[capability], env)


Value = TypeVar("Value")


def require_metric(metrics: Mapping[str, Value], name: str, part: str) -> Value:
    """Return a metric, or raise a MissingField for the part, "reward" or "strategy", that requires it."""
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise MissingField(f"This {part} needs the metric '{name}'; the environment measures: {known}.")
    return metrics[name]


class Part(ABC):  # noqa: B024 - subclasses have the abstract methods
    """Base class of the parts; everything that affects future calls is in `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""


@dataclass(frozen=True)
class PromptPool:
    """The tasks to sample from; keys are unique."""

    tasks: Sequence[Task]  # K, with the budget and temperature of the recipe
    category: Tensor | None = None  # (K,) int
    difficulty: Tensor | None = None  # (K,) larger is harder

    def require(self, name: str) -> Tensor:
        """Return the category or difficulty `(K,)`.

        Raises:
            UserError: The tasks do not have it.
        """
        value = getattr(self, name)
        if value is None:
            raise UserError(f"This curriculum needs the {name} of every task, which these tasks do not have.")
        return value


class Sampler(Part):
    """Choice of the next tasks."""

    @abstractmethod
    def setup(self, pool: PromptPool, seed: int) -> None:
        """Set the pool of tasks, once and before any other call."""

    @abstractmethod
    def propose(self, n: int) -> list[Task]:
        """Return the next `n` tasks."""

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Update from rollouts without hints.

        Args:
            keys: (M,) int, task keys.
            rewards: (M,).
            advantage: (M,) mean |advantage| of the rows of the key in the update, 0 without rows.
        """


class RolloutStrategy(Part):
    """Dependence of the rollouts of a task on each other."""

    def check(self, task: Any) -> None:
        """Raise a ValueError if the strategy does not support the task, e.g. a `robopolicy.text.task.TextTask`."""

    @abstractmethod
    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """Return `task.budget` trajectories of every task, adjacent to each other."""


class Intervention(Part):
    """Replacement of a group without a learning signal."""

    @abstractmethod
    def applies(self, rewards: Tensor) -> bool:
        """Whether to intervene in a group with rewards `(G,)`."""

    @abstractmethod
    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Return the replacement of a group for which `applies` is true."""

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Observe all groups of a batch after the interventions."""


@dataclass(frozen=True)
class Outcomes:
    """Inputs of rewards: one entry per trajectory."""

    key: Tensor  # (M,) int, group of each trajectory
    reward: Tensor  # (M,) of the chain so far
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (M,) by name

    def require(self, name: str) -> Tensor:
        """Return a metric `(M,)`; raise `MissingField` if the environment does not measure it."""
        return self.reward if name == "reward" else require_metric(self.metrics, name, "reward")


class Reward(Part):
    """A reward computed from the previous reward and the metrics of the environment."""

    weighted_objectives: Sequence[str] = ()  # O metrics whose influence on the policy it uses

    @abstractmethod
    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""

    def set_influence(self, influence: Tensor) -> None:
        """Set the improvement `(O,)` of each objective by an update for all of them; called by the learner."""


class Staleness(Part):
    """Bound on the age of the weights that sampled a training batch."""

    limit: int  # s, updates

    @abstractmethod
    def admit(self, version: int, current: int) -> bool:
        """Whether weights of version `current` may be trained on trajectories of `version`."""

    @abstractmethod
    def in_flight(self, batch: int) -> int:
        """Return the maximum number of groups in flight, given the groups per batch."""


class AskTellOptimizer(Part):
    """Gradient-free search with the ask-tell interface."""

    @abstractmethod
    def ask(self) -> Tensor:
        """Return candidates `(P, D)`."""

    @abstractmethod
    def tell(self, fitness: Tensor) -> None:
        """Report the fitness `(P,)` of the last candidates, higher is better; NaN counts as the worst."""

    @abstractmethod
    def best(self) -> Tensor:
        """Return the best vector (D,)."""


def degenerate(rewards: Tensor, spread: float = 1e-6) -> bool:
    """Whether all rewards of a group `(G,)` are equal."""
    return bool((rewards.max() - rewards.min()).item() <= spread)


def rewards_of(group: Sequence[Trajectory]) -> Tensor:
    """Return the rewards `(G,)` of trajectories."""
    return torch.tensor([trajectory.reward for trajectory in group], dtype=torch.float64)
