"""Sums of two numbers below 30, written as `17+28=`."""

from __future__ import annotations

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask
from robopolicy.text.verify import exact

LIMIT = 30
FAR, TRIES = 2**40, 2000  # first seed of paraphrased problems, and number of candidates for each


class Arithmetic(TextTask):
    """Additions; the answer must be exact."""

    name = "text/arithmetic"
    prompt_bytes, completion_bytes = 16, 6
    response_pattern = r"\d{1,2}"

    def episode(self, seed: int) -> SingleTurn:
        """Two numbers drawn uniformly from 0 to 29."""
        first, second = numbers(seed)
        answer = str(first + second)
        return SingleTurn(
            f"{first}+{second}=",
            lambda completion: exact(completion, answer),
            answer,
            is_number,
            progress=lambda completion: right_digits(completion, answer),
        )

    def category(self, seed: int) -> int:
        """How many of the two numbers have two digits."""
        return sum(number >= 10 for number in numbers(seed))

    def difficulty(self, seed: int) -> float:
        """Number of digits of both numbers, plus one with a carry."""
        first, second = numbers(seed)
        return len(f"{first}{second}") + float(first % 10 + second % 10 >= 10)

    def paraphrase(self, seed: int, how: str) -> int:
        """First of several other seeds with different numbers, and an easier sum if `how` is simpler."""
        mine, hard = numbers(seed), self.difficulty(seed)
        for other in range(FAR + TRIES * seed, FAR + TRIES * (seed + 1)):
            found = numbers(other)
            same = sum(found) == sum(mine) and set(found) != set(mine)
            if same and (how == "varied" or self.difficulty(other) < hard):
                return other
        return seed


def numbers(seed: int) -> tuple[int, int]:
    """The two summands."""
    first, second = np.random.default_rng(seed).integers(0, LIMIT, 2).tolist()
    return first, second


def is_number(completion: str) -> bool:
    """Whether the text consists of digits."""
    return completion.strip().isdigit()


def right_digits(completion: str, answer: str) -> float:
    """Fraction of correct digits, aligned at the last digit; extra digits count as wrong."""
    response = completion.strip()
    if not response.isdigit():
        return 0.0
    pairs = zip(reversed(response), reversed(answer), strict=False)
    return sum(one == other for one, other in pairs) / max(len(response), len(answer))
