"""Mirror-symmetry tests of the theme's on-policy learners."""

from __future__ import annotations

import pytest
from mirrored_learners import check_averages_both_sides


@pytest.mark.parametrize("name", ["bpo", "mdpo"])
def test_loss_averages_original_and_mirrored_rows_and_kl_uses_the_original_rows(name: str) -> None:
    check_averages_both_sides(name)
