"""A Python program as a policy, run in the sandbox (IPP, Aravindan et al. 2025).

    def act(obs):                          # robots: {"state": [x, y, ...]}, the newest observation
        return [obs["state"][4] - obs["state"][0], 0.0]

    def act(messages):                     # text tasks: alternating messages of environment and policy
        return "n" if "at 00" in messages[-1] else "e"

The program runs from scratch for every decision and row, so it keeps no state between calls. It may import what the
sandbox allows, and its output is dropped. A row for which it fails gets zeros, or an empty message, and `errors` holds
the reason. A program that hangs or crashes three times is not called again. It cannot be exported.

`robopolicy.contrib.programs.search` improves such programs, with the proposers of `robopolicy.contrib.programs.refine`.
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
from robopolicy.contrib.programs.sandbox.runner import IMPORTS, Sandbox, SandboxError
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.wrappers.black_box import BlackBoxConfig, BlackBoxPolicy
from robopolicy.text.task import KEY, messages, pack, unpack

MAX_CRASHES = 3  # processes that may hang or crash before a program is disabled
MAX_ERRORS = 100  # errors that are kept


@dataclass(frozen=True)
class ProgramConfig(BlackBoxConfig):
    """Source and resource limits of a program."""

    noise: bool = False  # programs are functions of the observation
    network_calls: PositiveInt = 1  # calls per decision
    source: str = ""  # Python text with a function `act`
    seconds: Positive = 2.0  # of wall time for all rows of a decision
    memory_mib: PositiveInt = 256  # address space of the process


class ProgramPolicy(BlackBoxPolicy):
    """A Python program; method `act`."""

    name: ClassVar[str] = "program"
    contains_code: ClassVar[bool] = True
    config_class = ProgramConfig
    config: ProgramConfig

    def __init__(self, config: ProgramConfig, spec: PolicySpec) -> None:
        """Check the program without running it.

        Raises:
            UserError: `check_program` rejects it, or the specification requires chunks.
        """
        super().__init__(config, spec)
        check_program(config.source)
        if spec.horizon != 1 or spec.obs_horizon != 1:
            raise UserError(
                "A program takes one observation and returns one action, got obs_horizon "
                f"{spec.obs_horizon} and horizon {spec.horizon}."
            )
        self.errors: list[str] = []  # errors since the last `take_errors`
        self.calls = self.failed = 0  # rows since the last `take_errors`, and rows without a valid result
        self._ended = 0  # processes that hung or crashed
        self._sandbox = Sandbox(seconds=config.seconds, memory_mib=config.memory_mib)

    @property
    def label(self) -> str:
        """The name in messages."""
        return "The program"

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Actions of all rows."""
        if KEY in self.spec.observation:
            texts = [
                self._text(responses) for responses in self._run([messages(text) for text in unpack(obs[KEY][:, 0])])
            ]
            return pack(texts, self.spec.action_dim)[:, None]
        rows = len(next(iter(obs.values())))
        lists = {key: value[:, -1].tolist() for key, value in obs.items()}
        given = [{key: value[row] for key, value in lists.items()} for row in range(rows)]
        return torch.tensor([self._action(found) for found in self._run(given)])[:, None]

    def take_errors(self) -> list[str]:
        """Return the distinct errors since the last call, the most frequent first, and reset them."""
        taken, self.errors = self.errors, []
        self.calls = self.failed = 0
        return sorted(set(taken), key=lambda error: (-taken.count(error), error))

    def notes(self) -> list[str]:
        """How often the program failed since the last call, with the first error; empty without failures."""
        calls, failed, first = self.calls, self.failed, self.errors[:1]
        self.take_errors()
        why = f", first with: {first[0]}" if first else ""
        return [f"the program failed in {failed} of {calls} decisions{why}."] if failed else []

    def _run(self, given: list[Any]) -> list[Any]:
        """Results of the program for each of `given`; None where it fails."""
        self.calls += len(given)
        if self._ended >= MAX_CRASHES:
            self.failed += len(given)
            return [None] * len(given)
        try:
            results = self._sandbox.call(self.config.source, "act", given)
        except SandboxError as error:
            self._ended += 1
            self._record_error(str(error), len(given))
            return [None] * len(given)
        for _, error in results:
            if error:
                self._record_error(error)
        return [result for result, _ in results]

    def _text(self, result: Any) -> str:
        if result is not None and not isinstance(result, str):
            self._record_error(f"act returned {type(result).__name__} instead of a text")
        return result if isinstance(result, str) else ""

    def _action(self, result: Any) -> list[float]:
        size = self.spec.action_dim
        fits = isinstance(result, list) and len(result) == size
        if fits and all(type(number) in (int, float) and math.isfinite(number) for number in result):
            return [float(number) for number in result]
        if result is not None:
            self._record_error(f"act did not return a list of {size} finite numbers")
        return [0.0] * size

    def _record_error(self, error: str, rows: int = 1) -> None:
        self.failed += rows
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)


def check_program(source: str) -> None:
    """Check a program without running it.

    Raises:
        UserError: It does not compile, has no function `act` of one argument, or imports a forbidden module.
    """
    try:
        tree = ast.parse(source)
        with warnings.catch_warnings(action="ignore"):
            compile(tree, "<program>", "exec")
    except SyntaxError as error:
        raise UserError(f"The program is not valid Python: line {error.lineno}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"The program is not valid Python: {error}.") from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "act"]
    if not found or len(found[-1].args.args) != 1:
        raise UserError("A program needs a function 'act' of one argument, e.g. def act(obs): return [0.0, 0.0].")
    for node in ast.walk(tree):
        if name := _forbidden(node):
            raise UserError(f"The program may not import {name}; it may import {', '.join(IMPORTS)}.")


def _forbidden(node: ast.AST) -> str:
    """Name and line of a forbidden import in a node; empty if there is none."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return ""
    own = [entry.name for entry in node.names]
    for name in own if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]:
        if name.split(".")[0] not in IMPORTS:
            return f"{name} (line {node.lineno})"
    return ""
