"""Random generators keyed by episode seed and step, the same with and without torch."""

from __future__ import annotations

import numpy as np


def episode_rng(seed: int, step: int) -> np.random.Generator:
    """Create the counter-based generator of `step` in the episode `seed`, independent of all other draws."""
    return np.random.Generator(np.random.Philox(key=(int(step) << 64) | (int(seed) & (2**64 - 1))))
