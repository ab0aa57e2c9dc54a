"""Countdown: reach a target with four numbers, each used once, by +, - and *, written as `3 5 7 2 24:`."""

from __future__ import annotations

import re
from math import prod

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask

COUNT = 4  # numbers of a problem
FORM = re.compile(rf"\d+(?:[-+*]\d+){{{COUNT - 1}}}")
PRODUCT = re.compile(r"([-+]?)(\d+(?:\*\d+)*)")


class Countdown(TextTask):
    """Countdown; every expression of the given numbers with the target value is a success."""

    name = "text/countdown"
    prompt_bytes, completion_bytes = 24, 12
    response_pattern = rf"\d(?:[-+*]\d){{{COUNT - 1}}}"

    def episode(self, seed: int) -> SingleTurn:
        """Draw four numbers from 1 to 9, and the value of a random expression of them as the target."""
        numbers, solution = _problem(seed)
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
        """Count the products of the known solution."""
        return _problem(seed)[1].count("*")

    def difficulty(self, seed: int) -> float:
        """Return the number of products, which makes larger values."""
        return float(self.category(seed))


def _problem(seed: int) -> tuple[list[int], str]:
    """Draw numbers and a solution."""
    draw = np.random.default_rng(seed)
    numbers = draw.integers(1, 10, COUNT).tolist()
    shuffled = [str(numbers[place]) for place in draw.permutation(COUNT)]
    signs = draw.choice(list("+-*"), COUNT - 1).tolist()
    return numbers, "".join(map("".join, zip(shuffled, [*signs, ""], strict=True)))


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
