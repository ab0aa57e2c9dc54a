"""The on-policy learners of this theme in the mirror."""

from __future__ import annotations

import pytest
from mirrored_learners import check_averages_both_sides


@pytest.mark.parametrize("name", ["bpo", "mdpo"])
def test_the_loss_is_the_mean_of_both_sides_and_the_kl_that_of_the_played_one(name: str) -> None:
    check_averages_both_sides(name)
