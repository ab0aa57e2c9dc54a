"""Settings of runs that fill an archive."""

from pathlib import Path

import pytest
from replay_runs import assert_refused


def test_what_was_played_is_not_drawn_from_by_priority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["experiment=arm_dcg_map_elites", "replay.prioritized=0.5"]
    assert_refused(settings, "Population replay does not support priorities", tmp_path, capsys)
