"""SAC swings a pendulum up; `benchmarks.pendulum` plays the same at full size."""

from pathlib import Path

import pytest
from swing_up import check_swings_up_and_holds


@pytest.mark.slow
def test_the_pendulum_is_swung_up_and_held(tmp_path: Path) -> None:
    check_swings_up_and_holds("sac", tmp_path)
