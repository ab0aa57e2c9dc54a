"""A Python program as a policy, run in the sandbox (IPP, Aravindan et al. 2025).

    def act(obs):                          # robots: {"state": [x, y, ...]}, the newest observation
        return [obs["state"][4] - obs["state"][0], 0.0]

    def act(messages):                     # text tasks: the world's and its own messages in turn, the world's first
        return "n" if "at 00" in messages[-1] else "e"

The program is run anew for every decision and row, so it keeps nothing between calls; it may import what the sandbox
allows, and what it prints is dropped. A row for which it fails plays zeros, or an empty message, and `reward_errors`
tells why; a program that hangs or breaks down three times is not asked again. It cannot be exported.

Who improves such programs is `robopolicy.contrib.programs.search` with the proposers of
`robopolicy.contrib.programs.refine`.
"""

from __future__ import annotations

import ast
import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import Positive, PositiveInt
from robopolicy.contrib.programs.sandbox import IMPORTS, Answerer
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.wrappers.black_box import BlackBoxConfig, BlackBoxPolicy
from robopolicy.text.task import KEY, messages, pack, unpack

PATIENCE = 3  # processes that may hang or break down before a program is given up
FAULTS = 100  # complaints that are kept


@dataclass(frozen=True)
class ProgramConfig(BlackBoxConfig):
    """What a program is and may use."""

    noise: bool = False  # programs are functions of the observation
    network_calls: PositiveInt = 1  # calls per decision
    source: str = ""  # Python text with a function `act`
    seconds: Positive = 2.0  # of wall time for all rows of a decision
    memory_mib: PositiveInt = 256  # address space of the process


class ProgramPolicy(BlackBoxPolicy):
    """A Python program; verb `act`."""

    name: ClassVar[str] = "program"
    config_class = ProgramConfig
    config: ProgramConfig

    def __init__(self, config: ProgramConfig, spec: PolicySpec) -> None:
        """Check the program as far as can be done without running it.

        Raises:
            UserError: `check_program` refuses it, or the specification asks for chunks.
        """
        super().__init__(config, spec)
        check_program(config.source)
        if spec.horizon != 1 or spec.obs_horizon != 1:
            raise UserError(
                f"A program sees one observation and gives one action, got obs_horizon {spec.obs_horizon} and horizon "
                f"{spec.horizon}."
            )
        self.reward_errors: list[str] = []  # complaints since they were last taken
        self.asked = self.failed = 0  # rows since complaints were last taken, and those without a usable answer
        self._ended = 0  # processes that hung or broke down
        limits = {"seconds": config.seconds, "memory_mib": config.memory_mib}
        self._answerer = Answerer(config.source, "act", **limits)

    @property
    def label(self) -> str:
        """As all programs."""
        return "The program"

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Actions of all rows, in one process."""
        if KEY in self.spec.observation:
            texts = [
                self._text(responses) for responses in self._run([messages(text) for text in unpack(obs[KEY][:, 0])])
            ]
            return pack(texts, self.spec.action_dim)[:, None]
        rows = len(next(iter(obs.values())))
        lists = {key: value[:, -1].tolist() for key, value in obs.items()}
        given = [{key: value[row] for key, value in lists.items()} for row in range(rows)]
        return torch.tensor([self._action(found) for found in self._run(given)])[:, None]

    def take_faults(self) -> list[str]:
        """Complaints since the last call, different ones only, the most frequent first."""
        taken, self.reward_errors = self.reward_errors, []
        self.asked = self.failed = 0
        return sorted(set(taken), key=lambda reward_failed: (-taken.count(reward_failed), reward_failed))

    def notes(self) -> list[str]:
        """How often the program failed since the last call, and with which fault first; nothing if it did not fail."""
        asked, failed, first = self.asked, self.failed, self.reward_errors[:1]
        self.take_faults()
        why = f", first with: {first[0]}" if first else ""
        return [f"the program failed in {failed} of {asked} decisions{why}."] if failed else []

    def _run(self, given: list[Any]) -> list[Any]:
        """What the program answers to each of `given`; None where it fails."""
        self.asked += len(given)
        if self._ended >= PATIENCE:
            self.failed += len(given)
            return [None] * len(given)
        try:
            answers = self._answerer.ask(given)
        except RuntimeError as error:
            self._ended += 1
            self._complain(str(error), len(given))
            return [None] * len(given)
        for _, complaint in answers:
            if complaint:
                self._complain(complaint)
        return [answer for answer, _ in answers]

    def _text(self, answer: Any) -> str:
        if answer is not None and not isinstance(answer, str):
            self._complain(f"act returned {type(answer).__name__} in place of a text")
        return answer if isinstance(answer, str) else ""

    def _action(self, answer: Any) -> list[float]:
        size = self.spec.action_dim
        fits = isinstance(answer, list) and len(answer) == size
        if fits and all(type(number) in (int, float) and math.isfinite(number) for number in answer):
            return [float(number) for number in answer]
        if answer is not None:
            self._complain(f"act did not return a list of {size} finite numbers")
        return [0.0] * size

    def _complain(self, reward_failed: str, rows: int = 1) -> None:
        self.failed += rows
        if len(self.reward_errors) < FAULTS:
            self.reward_errors.append(reward_failed)


def check_program(source: str) -> None:
    """Refuse what is no program, as far as can be told without running it.

    Raises:
        UserError: It does not compile, has no function `act` of one argument, or imports what is not allowed.
    """
    try:
        tree = ast.parse(source)
        with warnings.catch_warnings(action="ignore"):
            compile(tree, "<program>", "exec")
    except SyntaxError as error:
        raise UserError(f"The program is no Python: line {error.lineno}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"The program is no Python: {error}.") from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "act"]
    if not found or len(found[-1].args.args) != 1:
        raise UserError("A program needs a function 'act' of one argument, e.g. def act(obs): return [0.0, 0.0].")
    for node in ast.walk(tree):
        if told := _forbidden(node):
            raise UserError(f"The program may not import {told}; it may import {', '.join(IMPORTS)}.")


def _forbidden(node: ast.AST) -> str:
    """What a node imports although the sandbox would stop it, and where; empty: nothing."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return ""
    own = [entry.name for entry in node.names]
    for name in own if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]:
        if name.split(".")[0] not in IMPORTS:
            return f"{name} (line {node.lineno})"
    return ""
