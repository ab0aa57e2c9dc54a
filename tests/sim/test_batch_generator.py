"""Tests of random numbers for many episodes: every row equals a numpy generator of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from robopolicy.sim.batch_generator import BatchGenerator, rejection_sample

SEEDS = [0, 1, 2, 2**32 - 1, 2**32, 2**40 + 7, *range(500, 600)]
DRAWS: dict[str, Callable[[Any], Any]] = {
    "vectors": lambda rng: rng.uniform(-0.06, 0.06, 7),
    "bounds per element": lambda rng: rng.uniform([0.4, -0.15], [0.6, 0.15]),
    "scalars": lambda rng: rng.uniform(-1, 1),
    "matrices": lambda rng: rng.random((4, 1)),
    "halves of an output": lambda rng: rng.integers(8192),
    "integers with rejections": lambda rng: rng.integers(5, 9 + 2, size=3),
    "normal": lambda rng: rng.standard_normal(9),
    "rejected": lambda rng: rejection_sample(rng, [0, 0], [1, 1], lambda pair, rows: np.hypot(*pair.T) < 0.7),
}


@pytest.mark.parametrize("first", DRAWS)
def test_every_row_equals_a_generator_of_its_own(first: str) -> None:
    batch, each = BatchGenerator(SEEDS), [np.random.default_rng(seed) for seed in SEEDS]
    for name in (first, *DRAWS, first):
        drawn, expected = DRAWS[name](batch), np.stack([DRAWS[name](rng) for rng in each])
        assert drawn.dtype == expected.dtype
        np.testing.assert_array_equal(drawn, expected, strict=True)


def test_unknown_methods_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="unifrm"):
        BatchGenerator([0]).unifrm(0, 1)
