"""Languages of `robopolicy program`: the conversion to policies, proposers of new programs, and printing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.contrib.programs.program import ProgramConfig, ProgramPolicy
from robopolicy.contrib.programs.refine import (
    PythonMutation,
    TextProposer,
    Write,
    python_briefing,
    tree_briefing,
    written_by,
)
from robopolicy.contrib.programs.search import Proposer, TreeMutation
from robopolicy.contrib.programs.tree import TreePolicy, make_tree_policy
from robopolicy.contrib.programs.trees.nodes import parse_tree
from robopolicy.contrib.programs.trees.outline import to_text
from robopolicy.errors import UserError
from robopolicy.evaluation.result import EvalResult
from robopolicy.plurals import counted
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.sim.contract import SimSpec
from robopolicy.text.policy import TextPolicy
from robopolicy.text.task import KEY
from robopolicy.training.checkpoint import load_policy
from robopolicy.worldmodel.success_detectors.vlm import ServedVLM

LONGEST = 4096  # maximum tokens of a served model


class Language(ABC):
    """A program language for one task."""

    file: str  # file name of the program in a checkpoint

    @abstractmethod
    def policy(self, text: str) -> Policy:
        """Convert a program to a policy.

        Raises:
            UserError: The program is invalid.
        """

    @abstractmethod
    def proposer(self, write: Write | None, strategy: str) -> Proposer:
        """Create a proposer of programs: a language model, or random changes."""

    @abstractmethod
    def shown(self, text: str) -> str:
        """Format the program for reading."""

    def errors(self, policy: Policy) -> list[str]:
        """Errors since the last call."""
        return []


class TreeLanguage(Language):
    """Behavior trees over skills."""

    file = "tree.json"

    def __init__(self, sim: SimSpec, skills: Mapping[str, Policy], rest: tuple[float, ...]) -> None:
        self.sim, self.skills, self.rest = sim, skills, rest
        specs = [skill.spec for skill in skills.values()]
        horizon = min([spec.horizon for spec in specs], default=1)
        action_horizon = min([horizon, *(spec.action_horizon for spec in specs)])
        self.spec = PolicySpec(_shapes(sim), sim.action_dim, horizon, action_horizon)

    def policy(self, text: str) -> TreePolicy:
        """Build the tree with the skills that it calls."""
        return make_tree_policy(parse_tree(text), self.skills, self.spec, rest=self.rest)

    def proposer(self, write: Write | None, strategy: str) -> Proposer:
        """A model that is prompted with the meaning of the numbers, or random changes."""
        if write is None:
            return TreeMutation(self.policy, tuple(self.skills))
        briefing = tree_briefing(self.sim.task, _meanings(self.sim), self.sim.action_names, tuple(self.skills))
        return TextProposer(write, briefing, self.policy, strategy=strategy)

    def shown(self, text: str) -> str:
        """One line per node."""
        return to_text(parse_tree(text))


class Python(Language):
    """Python programs in the sandbox."""

    file = "program.py"

    def __init__(self, sim: SimSpec) -> None:
        self.sim = sim
        self.spec = PolicySpec(_shapes(sim), sim.action_dim)

    def policy(self, text: str) -> ProgramPolicy:
        """Build the program."""
        return ProgramPolicy(ProgramConfig(source=text), self.spec)

    def proposer(self, write: Write | None, strategy: str) -> Proposer:
        """A model that is prompted with the meaning of the numbers, or random changes."""
        if write is None:
            return PythonMutation(self.policy)
        text = KEY in self.sim.observation
        briefing = python_briefing(self.sim.task, _meanings(self.sim), self.sim.action_names, text=text)
        return TextProposer(write, briefing, self.policy, strategy=strategy)

    def shown(self, text: str) -> str:
        """Return the source."""
        return text

    def errors(self, policy: Policy) -> list[str]:
        """Errors reported by the sandbox."""
        return policy.take_errors() if isinstance(policy, ProgramPolicy) else []


def load_llm(name: str, device: str) -> Write:
    """Load a language model: MODEL@URL of a server, or the checkpoint folder of a text policy.

    Raises:
        UserError: The model does not exist or writes no text.
    """
    model, at, url = name.partition("@")
    if at:
        served = ServedVLM(url, model, max_tokens=LONGEST)
        return lambda prompt, seed: served(prompt, [], seed)
    policy = load_policy(Path(name), device)[0]
    if not isinstance(policy, TextPolicy):
        raise UserError(f"{name} is a policy '{policy.name}', which writes no text; pass the policy of a text task.")
    return written_by(policy)


def feedback(result: EvalResult, errors: list[str]) -> str:
    """Summarise the episodes of a program as feedback to its author."""
    episodes = counted(result.n, "episode")
    lines = [] if result.success is None else [f"success in {int(result.success.sum())} of {episodes}"]
    lines.append(f"mean return {result.returns.mean():.3g}, mean length {result.lengths.mean():.3g} steps")
    if result.success is not None and not result.success.all():
        missed = result.lengths[~result.success]
        lines.append(f"failures last {missed.mean():.3g} steps on average")
    return "; ".join([*lines, *errors[:3]])


def _shapes(sim: SimSpec) -> dict[str, tuple[int, ...]]:
    return {key: tuple(entry.shape) for key, entry in sim.observation.items()}


def _meanings(sim: SimSpec) -> dict[str, list[Any]]:
    named = {key: entry for key, entry in sim.observation.items() if len(entry.shape) == 1}
    return {key: list(entry.names) or list(range(entry.shape[0])) for key, entry in named.items()}
