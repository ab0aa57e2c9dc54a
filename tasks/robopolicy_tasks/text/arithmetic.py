"""Sums of several numbers, written as `3+8+2+4+1=`; the answer must be exact.

`text/arithmetic` has 1.1 million problems of five or six digits. `text/arithmetic_hard` has three to six numbers below
100, which are added or subtracted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask
from robopolicy.text.verify import exact

FAR, TRIES = 2**40, 2000  # first seed of paraphrased problems, and number of candidates for each
INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Summands:
    """Numbers that are added or subtracted from left to right."""

    numbers: tuple[int, ...]
    minus: tuple[bool, ...]  # whether each number after the first is subtracted

    @classmethod
    def draw(cls, seed: int, terms: tuple[int, int], largest: int, *, subtract: bool) -> Summands:
        """Draw a count of numbers between the `terms`, numbers up to `largest` and, with `subtract`, their signs."""
        draw = np.random.default_rng(seed)
        count = int(draw.integers(terms[0], terms[1] + 1))
        numbers = draw.integers(0, largest + 1, count).tolist()
        return cls(tuple(numbers), tuple(draw.integers(0, 1 + subtract, count - 1).astype(bool).tolist()))

    @property
    def value(self) -> int:
        """Result."""
        signs = [-1 if minus else 1 for minus in self.minus]
        return self.numbers[0] + sum(sign * number for sign, number in zip(signs, self.numbers[1:], strict=True))

    @property
    def prompt(self) -> str:
        """Text of the problem."""
        return "".join(self._signed()).removeprefix("+") + "="

    @property
    def content(self) -> str:
        """Text that is equal for the same signed numbers in another order."""
        return "".join(sorted(self._signed()))

    def _signed(self) -> list[str]:
        signs = ["-" if minus else "+" for minus in (False, *self.minus)]
        return [f"{sign}{number}" for sign, number in zip(signs, self.numbers, strict=True)]


class Arithmetic(TextTask):
    """Sums of five or six digits."""

    name = "text/arithmetic"
    prompt_bytes, completion_bytes = 16, 6
    response_pattern = r"\d{1,2}"
    terms: ClassVar[tuple[int, int]] = (5, 6)  # fewest and most numbers of a problem
    largest: ClassVar[int] = 9  # number
    subtract: ClassVar[bool] = False  # half of the numbers

    def summands(self, seed: int) -> Summands:
        """Return the numbers of a problem."""
        return Summands.draw(seed, self.terms, self.largest, subtract=self.subtract)

    def content(self, seed: int) -> str:
        """Return the signed numbers in a fixed order."""
        return self.summands(seed).content

    def episode(self, seed: int) -> SingleTurn:
        """Return the problem of a seed."""
        terms = self.summands(seed)
        answer = str(terms.value)
        return SingleTurn(
            terms.prompt,
            lambda completion: exact(completion, answer),
            answer,
            is_integer,
            progress=lambda completion: right_characters(completion, answer),
        )

    def category(self, seed: int) -> int:
        """Return the count of numbers above the fewest."""
        return len(self.summands(seed).numbers) - self.terms[0]

    def difficulty(self, seed: int) -> float:
        """Count the numbers and the subtractions."""
        terms = self.summands(seed)
        return float(len(terms.numbers) + sum(terms.minus))

    def paraphrase(self, seed: int, how: str) -> int:
        """Return the first training seed with the same value of other numbers, and easier if `how` is simpler."""
        own, difficulty = self.summands(seed), self.difficulty(seed)
        for other in range(FAR + TRIES * seed, FAR + TRIES * (seed + 1)):
            found = self.summands(other)
            same = found.value == own.value and sorted(found.numbers) != sorted(own.numbers)
            easier = how == "varied" or self.difficulty(other) < difficulty
            if same and easier and not self.is_held_out(other):
                return other
        return seed


class ArithmeticHard(Arithmetic):
    """Sums and differences of three to six numbers below 100."""

    name = "text/arithmetic_hard"
    prompt_bytes = 24
    response_pattern = r"-?\d{1,3}"
    terms, largest, subtract = (3, 6), 99, True


def is_integer(completion: str) -> bool:
    """Whether the text is an integer."""
    return INTEGER.fullmatch(completion.strip()) is not None


def right_characters(completion: str, answer: str) -> float:
    """Compute the fraction of correct characters, aligned at the last one; extra characters count as wrong."""
    response = completion.strip()
    if not is_integer(response):
        return 0.0
    pairs = zip(reversed(response), reversed(answer), strict=False)
    return sum(one == other for one, other in pairs) / max(len(response), len(answer))
