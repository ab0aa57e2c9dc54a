"""Countdown: reach a target with three numbers, each used once, by +, - and *, written as `3 5 7 22:`."""

from __future__ import annotations

import re

import numpy as np

from robopolicy.text.task import Question, TextTask

FORM = re.compile(r"(\d+)([-+*])(\d+)([-+*])(\d+)")


class Countdown(TextTask):
    """Any expression with the right numbers and the right value is a success."""

    name = "text/countdown"
    prompt_bytes, completion_bytes = 24, 12

    def episode(self, seed: int) -> Question:
        """Three numbers from 1 to 9 and the value of a random expression of them."""
        draw = np.random.default_rng(seed)
        numbers = draw.integers(1, 10, 3).tolist()
        order = draw.permutation(3)
        first, second = draw.choice(list("+-*"), 2).tolist()
        solution = f"{numbers[order[0]]}{first}{numbers[order[1]]}{second}{numbers[order[2]]}"
        target = value_of(solution)
        assert target is not None
        prompt = f"{' '.join(map(str, numbers))} {target[0]}:"
        return Question(
            prompt,
            lambda completion: _verify(completion, numbers, target[0]),
            solution,
            lambda completion: value_of(completion) is not None,
        )


def value_of(expression: str) -> tuple[int, list[int]] | None:
    """Value of `a.b.c` with the usual precedence, and its numbers; None where it has another form."""
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
