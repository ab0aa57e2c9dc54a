"""Tests of settings of archive runs."""

from pathlib import Path

import pytest
from replay_runs import assert_refused


def test_prioritized_population_replay_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["experiment=arm_dcg_map_elites", "replay.prioritized=0.5"]
    assert_refused(settings, "Population replay does not support priorities", tmp_path, capsys)
