"""Sums to answer, `17+28=`, and answers of others to judge: `17+28=46?` wants `y` or `n`.

Half of the problems are of each kind (categories 0 and 1); half of the answers to judge are wrong, mostly by little.
"""

from __future__ import annotations

import numpy as np

from robopolicy.text.task import Question, TextTask
from robopolicy.text.verify import exact
from tasks.text.arithmetic import LIMIT, is_number

VERDICTS = ("n", "y")
ERRORS = (-10, -2, -1, 1, 2, 10)  # of a wrong answer


class Critique(TextTask):
    """Answers and verdicts; both must be exact."""

    name = "text/critique"
    prompt_bytes, completion_bytes = 16, 6

    def episode(self, seed: int) -> Question:
        """A sum, or somebody's answer to one."""
        judges, first, second, error = _problem(seed)
        if not judges:
            answer = str(first + second)
            return Question(f"{first}+{second}=", lambda completion: exact(completion, answer), answer, is_number)
        verdict = VERDICTS[error == 0]
        return Question(
            f"{first}+{second}={first + second + error}?",
            lambda completion: exact(completion, verdict),
            verdict,
            lambda completion: completion.strip() in VERDICTS,
        )

    def category(self, seed: int) -> int:
        """0: a sum, 1: an answer to judge."""
        return int(_problem(seed)[0])


def _problem(seed: int) -> tuple[bool, int, int, int]:
    """Whether to judge, both numbers, and the error of the answer to judge."""
    draw = np.random.default_rng(seed)
    judges, wrong = draw.integers(0, 2, 2).astype(bool).tolist()
    first, second = draw.integers(0, LIMIT, 2).tolist()
    errors = [error for error in ERRORS if first + second + error >= 0]
    return judges, first, second, int(draw.choice(errors)) if wrong else 0
