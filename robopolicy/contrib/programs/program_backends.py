"""What programs of `robopolicy program` are written in: how one becomes a policy, who writes others, how one looks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.contrib.programs.program import ProgramConfig, ProgramPolicy
from robopolicy.contrib.programs.refine import (
    PythonChanges,
    TextProposer,
    Write,
    python_briefing,
    tree_briefing,
    written_by,
)
from robopolicy.contrib.programs.search import Proposer, TreeChanges
from robopolicy.contrib.programs.tree import TreePolicy, grow
from robopolicy.contrib.programs.trees.nodes import parse_tree
from robopolicy.contrib.programs.trees.outline import outline
from robopolicy.errors import UserError
from robopolicy.evaluation.result import EvalResult
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.sim.contract import SimSpec
from robopolicy.text.policy import TextPolicy
from robopolicy.text.task import KEY
from robopolicy.training.checkpoint import load_policy
from robopolicy.worldmodel.success_detectors.vlm import ServedVLM

TOKEN = "ROBOPOLICY_AUTHOR_TOKEN"  # environment variable that holds the token of a served author
LONGEST = 4096  # tokens that a served author may write


class Language(ABC):
    """A language for one task."""

    file: str  # what the program is called in a checkpoint

    @abstractmethod
    def policy(self, text: str) -> Policy:
        """A program as a policy.

        Raises:
            UserError: It is none.
        """

    @abstractmethod
    def proposer(self, write: Write | None, strategy: str) -> Proposer:
        """Who writes others: a model, or chance."""

    @abstractmethod
    def shown(self, text: str) -> str:
        """The program for people."""

    def complaints(self, policy: Policy) -> list[str]:
        """What went wrong while the policy played."""
        return []


class TreeLanguage(Language):
    """Behaviour trees over skills."""

    file = "tree.json"

    def __init__(self, sim: SimSpec, skills: Mapping[str, Policy], rest: tuple[float, ...]) -> None:
        self.sim, self.skills, self.rest = sim, skills, rest
        specs = [skill.spec for skill in skills.values()]
        horizon = min([spec.horizon for spec in specs], default=1)
        action_horizon = min([horizon, *(spec.action_horizon for spec in specs)])
        self.spec = PolicySpec(_shown(sim), sim.action_dim, horizon, action_horizon)

    def policy(self, text: str) -> TreePolicy:
        """The tree, with the skills that it calls."""
        return grow(parse_tree(text), self.skills, self.spec, rest=self.rest)

    def proposer(self, write: Write | None, strategy: str) -> Proposer:
        """A model that is told what the numbers mean, or random changes."""
        if write is None:
            return TreeChanges(self.policy, tuple(self.skills))
        briefing = tree_briefing(self.sim.task, _meanings(self.sim), self.sim.action_names, tuple(self.skills))
        return TextProposer(write, briefing, self.policy, strategy=strategy)

    def shown(self, text: str) -> str:
        """One line per node."""
        return outline(parse_tree(text))


class Python(Language):
    """Python programs in the sandbox."""

    file = "program.py"

    def __init__(self, sim: SimSpec) -> None:
        self.sim = sim
        self.spec = PolicySpec(_shown(sim), sim.action_dim)

    def policy(self, text: str) -> ProgramPolicy:
        """The program."""
        return ProgramPolicy(ProgramConfig(source=text), self.spec)

    def proposer(self, write: Write | None, strategy: str) -> Proposer:
        """A model that is told what the numbers mean, or random changes."""
        if write is None:
            return PythonChanges(self.policy)
        text = KEY in self.sim.observation
        briefing = python_briefing(self.sim.task, _meanings(self.sim), self.sim.action_names, text=text)
        return TextProposer(write, briefing, self.policy, strategy=strategy)

    def shown(self, text: str) -> str:
        """As it is."""
        return text

    def complaints(self, policy: Policy) -> list[str]:
        """What the sandbox reported."""
        return policy.take_faults() if isinstance(policy, ProgramPolicy) else []


def author(name: str, device: str) -> Write:
    """The model called `name`: MODEL@URL of a served one, or the folder of a text policy's checkpoint.

    Raises:
        UserError: There is none.
    """
    model, at, url = name.partition("@")
    if at:
        served = ServedVLM(url, model, token=os.environ.get(TOKEN, ""), max_tokens=LONGEST)
        return lambda prompt, seed: served(prompt, [], seed)
    policy = load_policy(Path(name), device)[0]
    if not isinstance(policy, TextPolicy):
        raise UserError(f"{name} is a policy '{policy.name}', which writes no text; take one of a text task.")
    return written_by(policy)


def feedback(result: EvalResult, complaints: list[str]) -> str:
    """What an author should know of the episodes that its program played."""
    lines = [] if result.success is None else [f"success in {int(result.success.sum())} of {result.n} episodes"]
    lines.append(f"mean return {result.returns.mean():.3g}, mean length {result.lengths.mean():.3g} steps")
    if result.success is not None and not result.success.all():
        missed = result.lengths[~result.success]
        lines.append(f"failures last {missed.mean():.3g} steps on average")
    return "; ".join([*lines, *complaints[:3]])


def _shown(sim: SimSpec) -> dict[str, tuple[int, ...]]:
    return {key: tuple(entry.shape) for key, entry in sim.observation.items()}


def _meanings(sim: SimSpec) -> dict[str, list[Any]]:
    named = {key: entry for key, entry in sim.observation.items() if len(entry.shape) == 1}
    return {key: list(entry.names) or list(range(entry.shape[0])) for key, entry in named.items()}
