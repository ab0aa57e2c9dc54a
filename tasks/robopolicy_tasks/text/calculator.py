"""Sums with a calculator tool: `3+8+2+4+1=`, answered directly or after the message `?`, which returns the sum.

Demonstrations call the tool in half of the problems, like a fine-tuned policy. The metric `calls` shows the effect of
rewards: a call is always correct, and free unless the recipe adds a cost. The metric `grounding` is 1 for calls and for
correct answers after a call.
"""

from __future__ import annotations

import numpy as np

from robopolicy.text.task import FORMAT, TextEpisode, TextTask, Turn
from robopolicy_tasks.text.arithmetic import Arithmetic, is_integer

CALL = "?"
ARITHMETIC = Arithmetic()  # source of the problems
_STREAM = 0x0CA1  # separates the random stream of demonstrations from the problems


class CalculatorEpisode(TextEpisode):
    """One problem."""

    def __init__(self, seed: int) -> None:
        terms = ARITHMETIC.summands(seed)
        self.answer, self.prompt = str(terms.value), terms.prompt
        self._calls_tool = bool(np.random.default_rng([_STREAM, seed]).integers(2))
        self._result_shown = False

    def step(self, completion: str) -> Turn:
        """Call the calculator, or answer."""
        response = completion.strip()
        if response == CALL:
            self._result_shown = True
            grades = {FORMAT: 1.0, "grounding": 1.0}
            return Turn(0.0, done=False, reply=f"{self.answer}=", calls=1, metrics=grades)
        right = response == self.answer
        grades = {FORMAT: float(is_integer(response)), "grounding": float(right and self._result_shown)}
        return Turn(float(right), success=right, calls=0, metrics=grades)

    def demonstration(self) -> list[str]:
        """Return the answer, in half of the problems after a call."""
        return [CALL, self.answer] if self._calls_tool and not self._result_shown else [self.answer]


class Calculator(TextTask):
    """The problems of `text/arithmetic` in up to three messages."""

    name = "text/calculator"
    prompt_bytes, completion_bytes, max_turns = 40, 6, 3

    def episode(self, seed: int) -> CalculatorEpisode:
        """Return the problem of a seed."""
        return CalculatorEpisode(seed)

    def content(self, seed: int) -> str:
        """Return the content in `text/arithmetic`."""
        return ARITHMETIC.content(seed)
