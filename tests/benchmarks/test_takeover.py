"""Tests of the study of corrections by a person: its rows, its comparisons and a small cell."""

from pathlib import Path

import pytest

from benchmarks.study_table import tabulate
from benchmarks.takeover.study import STUDY, Takeover


def cell(seed: int, corrected: float) -> dict[str, object]:
    rates = {"cloned": 0.8, "dagger": corrected, "control": 0.8}
    common = {"task": "lift", "seed": seed, "updates": 1000, "corrected": 0.25, "seconds": 300.0}
    return {**common, **{name: {"success": rate, "n": 200} for name, rate in rates.items()}}


def test_corrections_are_compared_with_training_without_them():
    cells = [cell(seed, 0.95 + 0.01 * seed) for seed in range(5)]
    entries = {entry.method: entry for entry in tabulate(STUDY, cells).entries}
    assert [(entry.contrast and entry.contrast.baseline) for entry in entries.values()] == [None, "cloned", "control"]
    verdict = entries["dagger"].verdict
    assert verdict and verdict.verdict == "ahead"
    assert STUDY.describe(cells[0]) == "80% -> 95% (without corrections 80%)"
    scores = [score for each in cells for score in STUDY.scores(each)]
    assert "25%" in STUDY.notes(scores)[0] and "300 s" in STUDY.notes(scores)[1]


@pytest.mark.slow
def test_a_cell_runs_from_the_gamepad_to_the_evaluation(tmp_path: Path):
    pytest.importorskip("pygame", reason="needs robopolicy[gamepad]")
    study = Takeover(5, 4)
    found = study.run(("lift", 0), tmp_path)
    assert all(found[name]["n"] == 4 for name in study.methods)
    assert 0 < found["corrected"] <= 1 and study.is_current(found) and not STUDY.is_current(found)
