"""The sampling side of a recipe: what is asked, how it is played, and what is done about groups that teach nothing.

    Sampler.propose -> Topology.rollout -> Reward -> Intervention -> batch -> core -> Sampler.observe

None of the parts knows whether an attempt is a text or an episode of a robot. The `RolloutEnv` knows; what a part needs
beyond playing is an ability of the world ("branch", "hint", ...), asked for with `require_capability`.
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
"""`Decisions.source`: drawn from the policy, kept from an earlier one, another's, with help, as a correction."""


@dataclass(frozen=True)
class Task:
    """What is to be attempted. Payload, prefix and context are plain values or tensors, so that checkpoints hold them.

    A context is a mapping with its `kind` ("instruction", "mode", "repair", a kind of hint) and what else the world
    needs; of instructions and modes that is a `text`. An attempt keeps the task it was played under: log-probabilities
    belong to the conditioning they were drawn with.
    """

    key: int  # prompt or start state; attempts of one key are a group
    payload: Any = None  # prompt, or what the simulator is reset to
    prefix: Any | None = None  # decisions that are given: the world continues after them
    context: Any | None = None  # conditioning beside the payload: hint, instruction, privileged observation
    temperature: float = 1.0
    budget: int = 1  # attempts


@dataclass(frozen=True)
class Trajectory:
    """One try at a task: a completion, a dialogue, an episode.

    Its decisions are `(1, T)` for a sequence, or one row per chunk, turn or context window. Their `logp_old` is what
    was recorded when they were drawn, and stays so however late they are learned from; `rescore` keeps it beside.
    """

    task: Task  # as played, hint and prefix included
    decisions: Decisions
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # what rewards read: calls, length, verdict
    source: int = POLICY
    version: int = 0  # of the weights that acted
    finished: bool = True  # False: stopped by a limit of the topology, and can be continued
    record: Any = None  # what the world needs to judge, continue or repair it; checkpoints leave it out

    @property
    def success(self) -> bool:
        """Whether it earned more than half a point."""
        return self.reward > 0.5


class RolloutEnv(Protocol):
    """Tasks and the policy that is trained, together, e.g. a text environment."""

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Attempt every task once, in order.

        Args:
            tasks: What is asked; budgets are the business of the topology.
            units: Stop after so many further units (turns, chunks); None: play to the end.
        """
        ...

    def batch(self, trajectories: Sequence[Trajectory]) -> Decisions:
        """Rows of all attempts, as `samplers.trajectories.stack` makes them."""
        ...


def require_capability(env: object, capability: str) -> Callable[..., Any]:
    """A function that not every world has: a method of it, or one of its registry `capabilities`, which take the world.

    Every world that can go on from the middle of an attempt has `branch(trajectory, unit)`, which returns the task that
    goes on after the first `unit` units; those stay decisions of the policy, as recorded.

    Raises:
        UserError: The world has no such function.
    """
    method = getattr(env, capability, None)
    if method is not None:
        return method
    registered: Mapping[str, Callable[..., Any]] = getattr(env, "capabilities", {})
    if capability not in registered:
        raise UserError(
            f"This recipe needs a world with the ability '{capability}', which {type(env).__name__} lacks; "
            "choose another recipe or task."
        )
    return partial(registered[capability], env)


Value = TypeVar("Value")


def require_metric(metrics: Mapping[str, Value], name: str, part: str) -> Value:
    """A metric that a part, "reward" or "topology", cannot do without.

    Raises:
        MissingField: The world does not measure it.
    """
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise MissingField(f"This {part} needs the metric '{name}'; the world measures: {known}.")
    return metrics[name]


class Part(ABC):  # noqa: B024 - its subclasses say what is abstract
    """Base of the parts that may have memory; what decides future calls goes into `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing, unless the part says otherwise."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most parts remember nothing
        """Restore `state_dict`."""


@dataclass(frozen=True)
class PromptPool:
    """Everything that may be attempted; keys are unique."""

    tasks: Sequence[Task]  # K, with the budget and temperature of a plain recipe
    category: Tensor | None = None  # (K,) int, kinds of tasks
    difficulty: Tensor | None = None  # (K,) harder where larger

    def require(self, name: str) -> Tensor:
        """The category or difficulty `(K,)`.

        Raises:
            UserError: The tasks come without.
        """
        value = getattr(self, name)
        if value is None:
            raise UserError(f"This curriculum needs the {name} of every task, which these tasks do not have.")
        return value


class Sampler(Part):
    """P12: what to attempt next, how often, and from where."""

    @abstractmethod
    def setup(self, pool: PromptPool, seed: int) -> None:
        """Get to know the tasks, once and before everything else."""

    @abstractmethod
    def propose(self, n: int) -> list[Task]:
        """The next `n` tasks."""

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Learn from what was played.

        Args:
            keys: (M,) int, of every attempt that was played, without help.
            rewards: (M,) their verdicts.
            advantage: (M,) mean |advantage| of the rows of that key that were learned from, 0 where there were none.
        """


class RolloutStrategy(Part):
    """P13: how the attempts at a task hang together."""

    def check(self, task: Any) -> None:
        """Refuse what can be played, e.g. a `robopolicy.text.task.TextTask`, before the first attempt.

        Raises:
            ValueError: Its attempts cannot be made so; one line.
        """

    @abstractmethod
    def rollout(self, env: RolloutEnv, tasks: Sequence[Task]) -> list[Trajectory]:
        """`task.budget` attempts at every task, those of one task side by side."""


class Intervention(Part):
    """P14: what is done about a group from whose rewards nothing can be learned."""

    @abstractmethod
    def applies(self, rewards: Tensor) -> bool:
        """Whether a group with rewards `(G,)` is in need."""

    @abstractmethod
    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """The group to learn from in its place; called for triggered groups alone."""

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """See all groups of a batch as they were played, after the interventions."""


@dataclass(frozen=True)
class Outcomes:
    """What rewards are composed from: one entry per attempt."""

    key: Tensor  # (M,) int, who is compared with whom
    reward: Tensor  # (M,) as composed so far
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (M,) by name

    def require(self, name: str) -> Tensor:
        """A metric `(M,)` that a reward cannot do without.

        Raises:
            ValueError: The world does not measure it.
        """
        return self.reward if name == "reward" else require_metric(self.metrics, name, "reward")


class Reward(Part):
    """P15: a reward made of the reward so far and of what the world measured.

    One that weighs objectives by what they do to the policy names them; the learner then tells it (`follow`).
    """

    objectives: Sequence[str] = ()  # O metrics

    @abstractmethod
    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Rewards `(M,)`."""

    def set_influence(self, influence: Tensor) -> None:
        """Hear how far an update for all objectives together improves each of them, `(O,)`."""


class Staleness(Part):
    """P17: how old the weights may be that drew what is learned from."""

    limit: int  # s, updates

    @abstractmethod
    def admit(self, version: int, current: int) -> bool:
        """Whether attempts drawn with weights `version` may be learned from by weights `current`."""

    @abstractmethod
    def in_flight(self, batch: int) -> int:
        """Attempts that may be under way or waiting at once."""


class AskTellOptimizer(Part):
    """P19: search without gradients."""

    @abstractmethod
    def ask(self) -> Tensor:
        """Candidates `(P, D)`."""

    @abstractmethod
    def tell(self, fitness: Tensor) -> None:
        """Fitness `(P,)` of the candidates asked for last, higher is better; a NaN counts as the worst."""

    @abstractmethod
    def best(self) -> Tensor:
        """The vector (D,) to end with."""


def degenerate(rewards: Tensor, spread: float = 1e-6) -> bool:
    """Whether all rewards of a group `(G,)` are equal."""
    return bool((rewards.max() - rewards.min()).item() <= spread)


def rewards_of(group: Sequence[Trajectory]) -> Tensor:
    """Rewards `(G,)` of attempts."""
    return torch.tensor([trajectory.reward for trajectory in group], dtype=torch.float64)
