"""Choice of episodes of a dataset: by success, length, quality and number, or at random."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError

Indices = NDArray[np.int64]


def split_indices(count: int, size: int, seed: int) -> tuple[Indices, Indices]:
    """Divide `count` episodes at random into two parts, both sorted; the second has `size` of them.

    Raises:
        UserError: A part would be empty.
    """
    if not 0 < size < count:
        raise UserError(f"{count} episodes cannot be split into {count - size} and {size}; both parts need some.")
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])
