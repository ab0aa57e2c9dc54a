"""Sums with a calculator at hand: `17+28=`, answered at once, or after the message `?`, to which the sum is told.

Solutions ask for every second problem, so that who imitates them calls the tool half of the time. What is learned from
rewards shows in the metric `calls`: asking is always right, and costs nothing unless the recipe says so. The grade
`grounding` tells whether messages rest on the tool: calls do, and answers that repeat what was told.
"""

from __future__ import annotations

import numpy as np

from robopolicy.text.task import FORMAT, Episode, TextTask, Turn
from robopolicy_tasks.text.arithmetic import LIMIT, is_number

CALL = "?"


class Sum(Episode):
    """One addition."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        first, second = draw.integers(0, LIMIT, 2).tolist()
        self.answer, self.prompt = str(first + second), f"{first}+{second}="
        self._asks = bool(draw.integers(2))
        self._told = False

    def step(self, completion: str) -> Turn:
        """Call the calculator, or answer."""
        said = completion.strip()
        if said == CALL:
            self._told = True
            grades = {FORMAT: 1.0, "grounding": 1.0}
            return Turn(0.0, done=False, reply=f"{self.answer}=", calls=1, measures=grades)
        right = said == self.answer
        grades = {FORMAT: float(is_number(said)), "grounding": float(right and self._told)}
        return Turn(float(right), success=right, calls=0, measures=grades)

    def demonstration(self) -> list[str]:
        """The answer, after a call for half of the problems where none was made."""
        return [CALL, self.answer] if self._asks and not self._told else [self.answer]


class Calculator(TextTask):
    """Additions in up to three messages."""

    name = "text/calculator"
    prompt_bytes, completion_bytes, max_turns = 40, 6, 3

    def episode(self, seed: int) -> Sum:
        """Two numbers drawn uniformly from 0 to 29."""
        return Sum(seed)
