"""Sums of digits to answer, `7+8=`, and answers to verify: `7+8=14?` wants `y` or `n`.

Half of the problems are of each kind (categories 0 and 1); half of the answers to verify are wrong, mostly by little. A
policy trained on both kinds can therefore judge answers to the sums (metric `open`) in place of their verifier.
Verifying is harder than answering, as there is no room for intermediate steps.
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
    """A sum with somebody's answer to it."""

    sum: str  # "7+8="
    answer: str  # the right one
    question: str  # "7+8=14?"
    right: bool  # whether that is it

    @property
    def verdict(self) -> str:
        """The expected verdict."""
        return VERDICTS[self.right]

    @classmethod
    def draw(cls, seed: int) -> CritiqueProblem:
        """Two digits, and an answer that is wrong in one of two cases."""
        return _problem(seed)[1]


class Critique(TextTask):
    """Answers and verdicts; both must be exact."""

    name = "text/critique"
    prompt_bytes, completion_bytes = 16, 6

    def episode(self, seed: int) -> SingleTurn:
        """A sum, or somebody's answer to one."""
        judges, claimed = _problem(seed)
        prompt, answer = (claimed.question, claimed.verdict) if judges else (claimed.sum, claimed.answer)
        return SingleTurn(
            prompt,
            lambda completion: exact(completion, answer),
            answer,
            lambda completion: completion.strip() in VERDICTS if judges else completion.strip().isdigit(),
            open=lambda completion: float(not judges),
        )

    def category(self, seed: int) -> int:
        """0: a sum, 1: an answer to judge."""
        return int(_problem(seed)[0])

    def difficulty(self, seed: int) -> float:
        """The sum itself."""
        return float(_problem(seed)[1].answer)

    def judge_prompt(self, seed: int, responses: Sequence[str]) -> JudgePrompt | None:
        """Prompt for a judge of an answer to a sum."""
        judges, claimed = _problem(seed)
        return None if judges else JudgePrompt(f"{claimed.sum}{responses[-1].strip()}?", *reversed(VERDICTS))


def _problem(seed: int) -> tuple[bool, CritiqueProblem]:
    """Whether to judge, and a sum with somebody's answer."""
    draw = np.random.default_rng(seed)
    judges, wrong = draw.integers(0, 2, 2).astype(bool).tolist()
    first, second = draw.integers(0, LIMIT, 2).tolist()
    errors = [error for error in ERRORS if first + second + error >= 0]
    error = int(draw.choice(errors)) if wrong else 0
    total = first + second
    return judges, CritiqueProblem(f"{first}+{second}=", str(total), f"{first}+{second}={total + error}?", error == 0)
