"""Its place, beside the packages, is what puts `docs`, `recipes` and `benchmarks` on the import path of the tests."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
