"""Test that `robopolicy compress` keeps no part of a policy on the CPU when it runs on a device."""

from pathlib import Path

import pytest
from device_commands import check_acts_on_a_device, policies


def test_a_compressed_policy_runs_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with policies(tmp_path, ("gaussian",)) as folder:
        sizes = ["--widths", "4", "--teacher-episodes", "2", "--final-updates", "2"]
        words = ["compress", "runs/gaussian/checkpoints/last", *sizes]
        check_acts_on_a_device(words, folder, tmp_path / "found", monkeypatch)
