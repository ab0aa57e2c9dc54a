"""Plans for a solver that executes one operation at a time: `2*3 7-a` for `7-2*3=`.

Every step takes two numbers; `a` is the result of the first step. The solver is not trained: it executes the plan, and
the reward verifies its last result. `consistency` is the fraction of steps that use each number of the problem once and
the result of the first step.
"""

from __future__ import annotations

import re

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask

SIGNS = "+-*"
STEP = re.compile(r"([0-9a])([-+*])([0-9a])")
RESULT = "a"  # of the first step


class Decompose(TextTask):
    """Two steps that solve a problem of three numbers."""

    name = "text/decompose"
    prompt_bytes, completion_bytes = 8, 10
    response_pattern = r"[0-9a][-+*][0-9a] [0-9a][-+*][0-9a]"

    def episode(self, seed: int) -> SingleTurn:
        """Draw three digits and two signs uniformly."""
        numbers, signs = _problem(seed)
        answer = solved(plan(numbers, signs))
        return SingleTurn(
            f"{numbers[0]}{signs[0]}{numbers[1]}{signs[1]}{numbers[2]}=",
            lambda completion: float(solved(completion) == answer),
            plan(numbers, signs),
            lambda completion: re.fullmatch(self.response_pattern, completion.strip()) is not None,
            consistency=lambda completion: consistency(completion, numbers),
        )

    def category(self, seed: int) -> int:
        """Return 1 if the second operation is executed first, else 0."""
        signs = _problem(seed)[1]
        return int(signs[1] == "*" and signs[0] != "*")


def plan(numbers: list[str], signs: list[str]) -> str:
    """Return the steps in order of precedence."""
    x, y, z = numbers
    if signs[1] == "*" and signs[0] != "*":
        return f"{y}*{z} {x}{signs[0]}{RESULT}"
    return f"{x}{signs[0]}{y} {RESULT}{signs[1]}{z}"


def solved(steps: str) -> int | None:
    """Execute the steps; None if a step is invalid."""
    result: int | None = None
    for step in steps.split():
        match = STEP.fullmatch(step)
        if match is None:
            return None
        pair = [result if side == RESULT else int(side) for side in (match[1], match[3])]
        left, right = pair
        if left is None or right is None:
            return None
        result = left + right if match[2] == "+" else left - right if match[2] == "-" else left * right
    return result


def consistency(steps: str, numbers: list[str]) -> float:
    """Compute the fraction of the two steps whose operands are unused, and for the second include the first result."""
    left, right = list(numbers), 0
    for number, step in enumerate(steps.split()[:2]):
        match = STEP.fullmatch(step)
        sides = [] if match is None else [match[1], match[3]]
        taken = [side for side in sides if side != RESULT]
        if number == sides.count(RESULT) and all(taken.count(side) <= left.count(side) for side in taken) and sides:
            right += 1
        for side in taken:
            if side in left:
                left.remove(side)
    return right / 2


def _problem(seed: int) -> tuple[list[str], list[str]]:
    draw = np.random.default_rng(seed)
    return [str(number) for number in draw.integers(0, 10, 3)], draw.choice(list(SIGNS), 2).tolist()
