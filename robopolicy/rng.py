"""Random streams that are functions of two numbers, the same for torch policies and for computers without torch."""

from __future__ import annotations

import numpy as np


def stream(seed: int, step: int) -> np.random.Generator:
    """The counter-based stream of decision `step` in the episode `seed`, whatever else draws."""
    return np.random.Generator(np.random.Philox(key=(int(step) << 64) | (int(seed) & (2**64 - 1))))
