"""Test that off-policy learners solve the pendulum swing-up; `benchmarks.pendulum` runs the task at full size."""

from __future__ import annotations

from pathlib import Path

import pytest
from swing_up import check_swings_up_and_holds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "env_steps"),
    [("dsac_t", 13_000), ("stac", 4500)],  # the targets of DSAC-T move with every second critic step
)
def test_learners_swing_up_and_balance_the_pendulum(tmp_path: Path, algorithm: str, env_steps: int) -> None:
    check_swings_up_and_holds(algorithm, tmp_path, env_steps)
