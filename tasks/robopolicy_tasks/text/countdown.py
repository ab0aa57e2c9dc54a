"""Countdown: reach a target with given numbers, each used once, written as `3 25 7 21:` with the answer `3+25-7`.

`text/countdown` has three numbers up to 40, which are added and subtracted. `text/countdown_hard` has four digits, with
products.
"""

from __future__ import annotations

import re
from math import prod
from typing import ClassVar

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask

FORM = re.compile(r"\d+(?:[-+*]\d+)+")
PRODUCT = re.compile(r"([-+]?)(\d+(?:\*\d+)*)")


class Countdown(TextTask):
    """Countdown; every expression of the given numbers with the target value is a success."""

    name = "text/countdown"
    prompt_bytes, completion_bytes = 24, 12
    response_pattern = r"\d{1,2}(?:[-+]\d{1,2}){2}"
    count: ClassVar[int] = 3  # numbers
    largest: ClassVar[int] = 40  # number
    signs: ClassVar[str] = "+-"

    def episode(self, seed: int) -> SingleTurn:
        """Draw numbers, and the value of a random expression of them as the target."""
        numbers, solution = self._problem(seed)
        found = value_of(solution)
        assert found is not None
        target = found[0]
        return SingleTurn(
            f"{' '.join(map(str, numbers))} {target}:",
            lambda completion: _verify(completion, numbers, target),
            solution,
            lambda completion: value_of(completion) is not None,
            progress=lambda completion: _closeness(completion, target),
        )

    def content(self, seed: int) -> str:
        """Return the prompt with sorted numbers."""
        *numbers, target = self.episode(seed).prompt.split()
        return " ".join([*sorted(numbers), target])

    def category(self, seed: int) -> int:
        """Count the signs of the known solution that are no plus."""
        return len(re.findall(r"[-*]", self._problem(seed)[1]))

    def difficulty(self, seed: int) -> float:
        """Return the category."""
        return float(self.category(seed))

    def _problem(self, seed: int) -> tuple[list[int], str]:
        """Draw numbers and a solution with the numbers in their order."""
        draw = np.random.default_rng(seed)
        numbers = draw.integers(1, self.largest + 1, self.count).tolist()
        signs = draw.choice(list(self.signs), self.count - 1).tolist()
        return numbers, "".join(map("".join, zip(map(str, numbers), [*signs, ""], strict=True)))


class CountdownHard(Countdown):
    """Countdown with four digits and products."""

    name = "text/countdown_hard"
    response_pattern = r"\d(?:[-+*]\d){3}"
    count, largest, signs = 4, 9, "+-*"


def value_of(expression: str) -> tuple[int, list[int]] | None:
    """Evaluate an expression with the usual precedence and return value and numbers; None for another form."""
    text = expression.strip()
    if FORM.fullmatch(text) is None:
        return None
    products = [(sign or "+", factors.split("*")) for sign, factors in PRODUCT.findall(text)]
    value = sum((-1 if sign == "-" else 1) * prod(map(int, factors)) for sign, factors in products)
    return value, [int(number) for _, factors in products for number in factors]


def _verify(completion: str, numbers: list[int], target: int) -> float:
    found = value_of(completion)
    return float(found is not None and found[0] == target and sorted(found[1]) == sorted(numbers))


def _closeness(completion: str, target: int) -> float:
    """Return 1 at the target, less with distance, and 0 for invalid expressions."""
    found = value_of(completion)
    return 0.0 if found is None else 1.0 / (1.0 + abs(found[0] - target))
