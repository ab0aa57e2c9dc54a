"""Test that SAC solves the pendulum swing-up; `benchmarks.pendulum` runs the same task at full size."""

from pathlib import Path

import pytest
from swing_up import check_swings_up_and_holds


@pytest.mark.slow
def test_sac_swings_up_and_balances_the_pendulum(tmp_path: Path) -> None:
    check_swings_up_and_holds("sac", tmp_path)
