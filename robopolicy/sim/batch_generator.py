"""Random numbers for many episodes at once, the same as one `numpy.random.default_rng(seed)` per episode draws.

PCG64 (O'Neill 2014) and the seeding of numpy (`SeedSequence`) are computed for all episodes by array operations, which
costs about a hundredth of one generator object per episode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bound = float | Sequence[float] | NDArray[np.float64]
Words = NDArray[np.uint64]
Size = int | tuple[int, ...] | None

_U32, _U64 = np.uint64(0xFFFFFFFF), (1 << 64) - 1
_SHIFT16, _SHIFT32, _SHIFT11 = np.uint64(16), np.uint64(32), np.uint64(11)
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645  # of PCG64
_UNIT = 1.0 / (1 << 53)


class BatchGenerator:
    """Generators of B episodes; every method of `numpy.random.Generator` returns arrays `(B, *size)`.

    Row i holds the numbers of `numpy.random.default_rng(seeds[i])` after the same calls. `uniform`, `random` and
    `integers` are computed for all rows at once, other methods row by row.
    """

    def __init__(self, seeds: Sequence[int] | NDArray[np.int64]) -> None:
        # (6, B): state and increment of 128 bits each, upper half first; upper half of an output of which only 32 bits
        # were used, and whether there is one.
        self._words: Words = np.zeros((6, len(seeds)), np.uint64)
        self._words[:4] = _seeded(np.asarray(seeds, np.uint64))

    def __len__(self) -> int:
        return self._words.shape[1]

    def random(self, size: Size = None) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1)."""
        return self.uniform(0.0, 1.0, size)

    def uniform(self, low: Bound = 0.0, high: Bound = 1.0, size: Size = None) -> NDArray[np.float64]:
        """Uniform numbers in [low, high), with `size` or the broadcast shape of the bounds."""
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        shape = np.broadcast_shapes(low.shape, high.shape) if size is None else _shape(size)
        count = math.prod(shape)
        unit = np.empty((len(self), count))
        for column in range(count):
            unit[:, column] = (self._next() >> _SHIFT11) * _UNIT
        return low + (high - low) * unit.reshape(len(self), *shape)

    def integers(self, low: int, high: int | None = None, size: Size = None) -> NDArray[np.int64]:
        """Uniform integers in [low, high), or in [0, low) without `high` (Lemire 2019)."""
        low, high = (0, low) if high is None else (low, high)
        span = high - low
        if not 1 < span < 1 << 32 or (1 << 32) % span:  # needs another draw if a number is rejected
            return self._each("integers", low, high, size)
        shape = _shape(size)
        drawn = [low + (self._next_half() * np.uint64(span) >> _SHIFT32) for _ in range(math.prod(shape))]
        return np.stack(drawn, 1).astype(np.int64).reshape(len(self), *shape) if shape else drawn[0].astype(np.int64)

    def select(self, rows: NDArray[np.intp]) -> BatchGenerator:
        """Copy of the generators of `rows` `(K,)`; `restore` puts them back after their draws."""
        part = copy(self)
        part._words = self._words[:, rows]
        return part

    def restore(self, rows: NDArray[np.intp], part: BatchGenerator) -> None:
        """Continue `rows` where `part`, made by `select`, has stopped."""
        self._words[:, rows] = part._words

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not hasattr(np.random.Generator, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._each(name, *args, **kwargs)

    def _each(self, name: str, *args: Any, **kwargs: Any) -> NDArray[Any]:
        """Call method `name` of one generator object with the state of every row."""
        bits: Any = np.random.PCG64(0)
        call = getattr(np.random.Generator(bits), name)
        values = []
        for row, (high, low, step_high, step_low, spare, has_spare) in enumerate(self._words.T.tolist()):
            pcg = {"state": high << 64 | low, "inc": step_high << 64 | step_low}
            bits.state = {"bit_generator": "PCG64", "state": pcg, "has_uint32": has_spare, "uinteger": spare}
            values.append(call(*args, **kwargs))
            after = bits.state
            state = divmod(after["state"]["state"], 1 << 64)
            self._words[:, row] = *state, step_high, step_low, after["uinteger"], after["has_uint32"]
        return np.stack(values)

    def _next(self) -> Words:
        """Next 64 bits of every row."""
        words = self._words
        high, product = _multiplied(words[0], words[1])
        low = product + words[3]
        high = high + words[2] + (low < product)
        words[:2] = high, low
        turn, mixed = high >> np.uint64(58), high ^ low
        return mixed >> turn | mixed << (np.uint64(64) - turn & np.uint64(63))

    def _next_half(self) -> Words:
        """Next 32 bits of every row: the lower half of 64 new bits, then the upper half."""
        words, (high, low) = self._words, self._words[:2].copy()
        new, spare, used = self._next(), words[4].copy(), words[5] > 0
        words[0], words[1] = np.where(used, high, words[0]), np.where(used, low, words[1])
        words[4], words[5] = np.where(used, 0, new >> _SHIFT32), ~used
        return np.where(used, spare, new & _U32)


def rejection_sample(
    rng: np.random.Generator | BatchGenerator,
    low: Bound,
    high: Bound,
    accept: Callable[[NDArray[np.float64], Any], Any],
) -> NDArray[np.float64]:
    """Draw uniform vectors `(D,)`, or `(B, D)` of a `BatchGenerator`, again until `accept` holds for each.

    `accept` is called with vectors `(K, D)` and their rows `(K,)`, or with `(D,)` and `...` for one episode.
    """
    values = rng.uniform(low, high)
    if isinstance(rng, np.random.Generator):
        while not accept(values, ...):
            values = rng.uniform(low, high)
        return values
    rows = np.arange(len(rng))
    while len(rows := rows[~accept(values[rows], rows)]):
        part = rng.select(rows)
        values[rows] = part.uniform(low, high)
        rng.restore(rows, part)
    return values


def _shape(size: Size) -> tuple[int, ...]:
    return () if size is None else (size,) if isinstance(size, int) else tuple(size)


def _seeded(seeds: Words) -> tuple[Words, Words, Words, Words]:
    """State and increment of PCG64, upper and lower 64 bits each, for every seed `(B,)`."""
    words = _hashed(seeds)
    initial, sequence = (words[0], words[1]), (words[2], words[3])
    step_high = sequence[0] << np.uint64(1) | sequence[1] >> np.uint64(63)
    step_low = sequence[1] << np.uint64(1) | np.uint64(1)
    low = step_low + initial[1]
    high = step_high + initial[0] + (low < step_low)
    high, product = _multiplied(high, low)
    low = product + step_low
    return high + step_high + (low < product), low, step_high, step_low


def _multiplied(high: Words, low: Words) -> tuple[Words, Words]:
    """Product of 128-bit numbers and the multiplier of PCG64, modulo 2**128."""
    factor_high, factor_low = np.uint64(_MULTIPLIER >> 64), np.uint64(_MULTIPLIER & _U64)
    f1, f0 = factor_low >> _SHIFT32, factor_low & _U32
    a1, a0 = low >> _SHIFT32, low & _U32
    middle = a1 * f0 + (a0 * f0 >> _SHIFT32)
    cross = a0 * f1 + (middle & _U32)
    upper = a1 * f1 + (middle >> _SHIFT32) + (cross >> _SHIFT32)
    return upper + high * factor_low + low * factor_high, low * factor_low


def _hashed(seeds: Words) -> list[Words]:
    """Four 64-bit words `(B,)` of `numpy.random.SeedSequence(seed)` for every seed."""
    constant = 0x43B0D7E5

    def hashed(value: Words, multiplier: int) -> Words:
        nonlocal constant
        value = value ^ np.uint64(constant)
        constant = constant * multiplier & 0xFFFFFFFF
        value = value * np.uint64(constant) & _U32
        return value ^ value >> _SHIFT16

    zero = np.zeros_like(seeds)
    pool = [hashed(value, 0x931E8875) for value in (seeds & _U32, seeds >> _SHIFT32, zero, zero)]
    for source in range(4):
        for target in range(4):
            if source != target:
                value = np.uint64(0xCA01F9DD) * pool[target] - np.uint64(0x4973F715) * hashed(pool[source], 0x931E8875)
                value &= _U32
                pool[target] = value ^ value >> _SHIFT16
    constant = 0x8B51F9DD
    halves = [hashed(pool[i % 4], 0x58F38DED) for i in range(8)]
    return [low | high << _SHIFT32 for low, high in zip(halves[::2], halves[1::2], strict=True)]
