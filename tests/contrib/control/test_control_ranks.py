"""Tests of the on-policy learners of the control theme in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Case, check_learns_as_one, play_both

CASES: list[Case] = [
    ("bpo", "gaussian", {"target_kl": 0.5}),
    ("mdpo", "gaussian", {}),
    ("subpo", "gaussian", {}),
    ("ta_lpo", "gaussian", {"entropy_coef": 0.01}),
]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    play_both(folder, CASES)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: CASES[n][0])
def test_two_processes_match_one_process_with_all_environments(two_processes: Path, number: int) -> None:
    check_learns_as_one(two_processes, number, CASES[number])
