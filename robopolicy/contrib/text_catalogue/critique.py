"""Sums of digits to answer, `7+8=`, and answers to verify, `7+8=14?` with the verdict `y` or `n`.

Half of the problems are of each kind (categories 0 and 1); half of the answers to verify are wrong, mostly by small
errors. A policy trained on both kinds can therefore replace the verifier of sums (metric `open`). Verifying is harder
than answering, because there are no intermediate steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.text.task import JudgePrompt, SingleTurn, TextTask
from robopolicy.text.verify import exact

VERDICTS = ("n", "y")
ERRORS = (-10, -2, -1, 1, 2, 10)  # of a wrong answer
LIMIT = 10


@dataclass(frozen=True)
class CritiqueProblem:
    """A sum with a proposed answer."""

    sum: str  # "7+8="
    answer: str  # the correct answer
    question: str  # "7+8=14?"
    right: bool  # whether the proposed answer is correct

    @property
    def verdict(self) -> str:
        """Correct verdict."""
        return VERDICTS[self.right]

    @classmethod
    def draw(cls, seed: int) -> CritiqueProblem:
        """Draw two digits, and an answer that is wrong with probability 1/2."""
        return _problem(seed)[1]


class Critique(TextTask):
    """Answers and verdicts; both must be exact."""

    name = "text/critique"
    prompt_bytes, completion_bytes = 16, 6

    def episode(self, seed: int) -> SingleTurn:
        """Return a sum, or a proposed answer to verify."""
        verifies, problem = _problem(seed)
        prompt, answer = (problem.question, problem.verdict) if verifies else (problem.sum, problem.answer)
        return SingleTurn(
            prompt,
            lambda completion: exact(completion, answer),
            answer,
            lambda completion: completion.strip() in VERDICTS if verifies else completion.strip().isdigit(),
            open=lambda completion: float(not verifies),
        )

    def category(self, seed: int) -> int:
        """Return 0 for a sum, 1 for an answer to verify."""
        return int(_problem(seed)[0])

    def difficulty(self, seed: int) -> float:
        """Return the sum."""
        return float(_problem(seed)[1].answer)

    def judge_prompt(self, seed: int, responses: Sequence[str]) -> JudgePrompt | None:
        """Return the prompt for a judge of an answer to a sum."""
        verifies, problem = _problem(seed)
        return None if verifies else JudgePrompt(f"{problem.sum}{responses[-1].strip()}?", *reversed(VERDICTS))


def _problem(seed: int) -> tuple[bool, CritiqueProblem]:
    """Draw whether to verify, and a sum with a proposed answer."""
    draw = np.random.default_rng(seed)
    verifies, wrong = draw.integers(0, 2, 2).astype(bool).tolist()
    first, second = draw.integers(0, LIMIT, 2).tolist()
    errors = [error for error in ERRORS if first + second + error >= 0]
    error = int(draw.choice(errors)) if wrong else 0
    total = first + second
    return verifies, CritiqueProblem(f"{first}+{second}=", str(total), f"{first}+{second}={total + error}?", error == 0)
