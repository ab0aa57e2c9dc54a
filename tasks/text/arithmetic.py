"""Sums of two numbers below 30, written as `17+28=`."""

from __future__ import annotations

import numpy as np

from robopolicy.text.task import Question, TextTask
from robopolicy.text.verify import exact

LIMIT = 30


class Arithmetic(TextTask):
    """Additions; the answer must be exact."""

    name = "text/arithmetic"
    prompt_bytes, completion_bytes = 16, 6

    def episode(self, seed: int) -> Question:
        """Two numbers drawn uniformly from 0 to 29."""
        first, second = np.random.default_rng(seed).integers(0, LIMIT, 2).tolist()
        answer = str(first + second)
        return Question(f"{first}+{second}=", lambda completion: exact(completion, answer), answer, is_number)


def is_number(completion: str) -> bool:
    """Whether it is digits alone."""
    return completion.strip().isdigit()
