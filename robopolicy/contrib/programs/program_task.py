"""Text task `text/program`: complete a table of numbers with a Python expression in `x`, checked in the sandbox."""

from __future__ import annotations

import ast

import numpy as np

from robopolicy.contrib.programs.sandbox.runner import Sandbox
from robopolicy.sim.registry import SimOptions
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask

SHOWN, HELD_OUT = (1, 2, 3), (4, 7, 10)
SECONDS = 2.0


class Program(TextTask):
    """Linear functions; an expression is scored on values that the prompt omits."""

    name = "text/program"
    prompt_bytes, completion_bytes = 40, 12
    reward_timeout = 2 * SECONDS

    def __init__(self) -> None:
        self._sandbox = Sandbox(seconds=SECONDS)
        self._sandbox.check()

    def episode(self, seed: int) -> SingleTurn:
        """The table of a x + b."""
        a, b = np.random.default_rng(seed).integers(1, 10, 2).tolist()
        prompt = " ".join(f"{x}->{a * x + b}" for x in SHOWN) + ":"
        expected = [a * x + b for x in HELD_OUT]
        return SingleTurn(prompt, lambda completion: self._verify(completion, expected), f"{a}*x+{b}", _is_expression)

    def _verify(self, completion: str, expected: list[int]) -> float:
        program = f"f = lambda x: ({completion.strip()})\nfor x in {HELD_OUT}:\n    print(f(x))\n"
        ran = self._sandbox.run(program)
        return float(ran.ok and ran.output.split() == [str(value) for value in expected])


def _is_expression(completion: str) -> bool:
    try:
        ast.parse(completion.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def make_program(options: SimOptions) -> TextSim:
    """Simulator of `text/program`."""
    return TextSim(Program(), options)
