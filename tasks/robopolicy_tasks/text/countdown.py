"""Countdown: reach a target with three numbers, each used once, by +, - and *, written as `3 5 7 22:`."""

from __future__ import annotations

import re

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask

FORM = re.compile(r"(\d+)([-+*])(\d+)([-+*])(\d+)")


class Countdown(TextTask):
    """Countdown; every expression of the given numbers with the target value is a success."""

    name = "text/countdown"
    prompt_bytes, completion_bytes = 24, 12
    response_pattern = r"\d[-+*]\d[-+*]\d"

    def episode(self, seed: int) -> SingleTurn:
        """Draw three numbers from 1 to 9, and the value of a random expression of them as the target."""
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

    def category(self, seed: int) -> int:
        """Count the products of the known solution."""
        return _problem(seed)[1].count("*")

    def difficulty(self, seed: int) -> float:
        """Return the number of products, which makes larger values."""
        return float(self.category(seed))


def _problem(seed: int) -> tuple[list[int], str]:
    """Draw numbers and a solution."""
    draw = np.random.default_rng(seed)
    numbers = draw.integers(1, 10, 3).tolist()
    order = draw.permutation(3)
    first, second = draw.choice(list("+-*"), 2).tolist()
    return numbers, f"{numbers[order[0]]}{first}{numbers[order[1]]}{second}{numbers[order[2]]}"


def value_of(expression: str) -> tuple[int, list[int]] | None:
    """Evaluate `a.b.c` with the usual precedence and return value and numbers; None for another form."""
    match = FORM.fullmatch(expression.strip())
    if match is None:
        return None
    a, b, c = (int(match[place]) for place in (1, 3, 5))
    if match[4] == "*" and match[2] != "*":
        return _apply(match[2], a, b * c), [a, b, c]
    return _apply(match[4], _apply(match[2], a, b), c), [a, b, c]


def _apply(sign: str, a: int, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def _verify(completion: str, numbers: list[int], target: int) -> float:
    found = value_of(completion)
    return float(found is not None and found[0] == target and sorted(found[1]) == sorted(numbers))


def _closeness(completion: str, target: int) -> float:
    """Return 1 at the target, less with distance, and 0 for invalid expressions."""
    found = value_of(completion)
    return 0.0 if found is None else 1.0 / (1.0 + abs(found[0] - target))
