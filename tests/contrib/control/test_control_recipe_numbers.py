"""Tests that recipes use the hyperparameters of their source and the clipped loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
from recipe_losses import check_clipped_loss
from recipe_numbers import CLIP, STAGE, check_numbers

NUMBERS: dict[str, dict[str, Any]] = {
    "gbpo": {CLIP + "low": 0.3, "estimator.surrogate_options.temperature": 1e-4},
    "polychromic": {STAGE + "set_advantage.size": 4, "group_size": 8},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_recipe_hyperparameters_match_the_source(name: str) -> None:
    check_numbers(name, NUMBERS[name])


def test_polychromic_recipe_uses_the_clipped_loss() -> None:
    check_clipped_loss("polychromic", 0.2, 0.2, math.inf, "sequence_mean")
