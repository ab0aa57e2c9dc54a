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
        """Draw two numbers uniformly from 0 to 29."""
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
        """Count the numbers with two digits."""
        return sum(number >= 10 for number in numbers(seed))

    def difficulty(self, seed: int) -> float:
        """Count the digits of both numbers, plus one for a carry."""
        first, second = numbers(seed)
        return len(f"{first}{second}") + float(first % 10 + second % 10 >= 10)

    def paraphrase(self, seed: int, how: str) -> int:
        """Return the first other seed with the same sum of different numbers, and an easier one if `how` is simpler."""
        own, difficulty = numbers(seed), self.difficulty(seed)
        for other in range(FAR + TRIES * seed, FAR + TRIES * (seed + 1)):
            found = numbers(other)
            same = sum(found) == sum(own) and set(found) != set(own)
            if same and (how == "varied" or self.difficulty(other) < difficulty):
                return other
        return seed


def numbers(seed: int) -> tuple[int, int]:
    """Draw the two summands."""
    first, second = np.random.default_rng(seed).integers(0, LIMIT, 2).tolist()
    return first, second


def is_number(completion: str) -> bool:
    """Whether the text consists of digits."""
    return completion.strip().isdigit()


def right_digits(completion: str, answer: str) -> float:
    """Compute the fraction of correct digits, aligned at the last digit; extra digits count as wrong."""
    response = completion.strip()
    if not response.isdigit():
        return 0.0
    pairs = zip(reversed(response), reversed(answer), strict=False)
    return sum(one == other for one, other in pairs) / max(len(response), len(answer))
