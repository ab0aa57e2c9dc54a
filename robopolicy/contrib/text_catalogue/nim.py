"""Nim: three heaps, `3 0 5:`; taking the last piece wins. `c2+` takes two of the third heap and claims that this wins.

The reward verifies the move: it must leave a lost position if possible, and otherwise be legal. The metric
`legal` covers only legality, and `analysis` whether the claim about the position is correct.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import xor

import numpy as np

from robopolicy.text.task import SingleTurn, TextTask

HEAPS, LARGEST = 3, 5
FORM = re.compile(r"([abc])([1-5])([+-])")


class Nim(TextTask):
    """Nim: any winning move is a success; in a lost position, any legal move."""

    name = "text/nim"
    prompt_bytes, completion_bytes = 8, 5
    response_pattern = FORM.pattern

    def episode(self, seed: int) -> SingleTurn:
        """Draw heaps uniformly, not all empty."""
        heaps = _heaps(seed)
        sign = "+" if value(heaps) else "-"
        return SingleTurn(
            f"{' '.join(map(str, heaps))}:",
            lambda completion: float(_good(heaps, completion)),
            _best(heaps) + sign,
            lambda completion: FORM.fullmatch(completion.strip()) is not None,
            legal=lambda completion: float(apply_move(heaps, completion) is not None),
            analysis=lambda completion: float(completion.strip()[2:] == sign),
        )

    def difficulty(self, seed: int) -> float:
        """Return the number of heaps that are not empty."""
        return float(sum(heap > 0 for heap in _heaps(seed)))


def value(heaps: list[int]) -> int:
    """Return the nim-sum: 0 if the player to move loses."""
    return reduce(xor, heaps)


def apply_move(heaps: list[int], move: str) -> list[int] | None:
    """Return the heaps after a move; None if the move is invalid."""
    match = FORM.fullmatch(move.strip())
    if match is None:
        return None
    place, count = "abc".index(match[1]), int(match[2])
    left = [*heaps[:place], heaps[place] - count, *heaps[place + 1 :]]
    return left if left[place] >= 0 else None


def _good(heaps: list[int], move: str) -> bool:
    left = apply_move(heaps, move)
    return left is not None and (value(left) == 0 or value(heaps) == 0)


def _best(heaps: list[int]) -> str:
    """Return a winning move, or else take one of a largest heap."""
    moves = [f"{name}{count}" for name in "abc" for count in range(1, LARGEST + 1)]
    largest = f"{'abc'[heaps.index(max(heaps))]}1"
    return next((move for move in moves if value(heaps) and _good(heaps, f"{move}+")), largest)


def _heaps(seed: int) -> list[int]:
    return divided(int(np.random.default_rng(seed).integers(1, (LARGEST + 1) ** HEAPS)))


def divided(number: int) -> list[int]:
    """Decode a number into the sizes of the heaps."""
    return [number // (LARGEST + 1) ** place % (LARGEST + 1) for place in range(HEAPS)]
