"""Tests of the charts of studies and of the evidence that sources get from their results."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from docs import study_pages
from docs.evidence import evidence


def entry(method: str, task: str, estimate: float, verdict: str | None = None) -> dict[str, Any]:
    common = {"measure": "return", "published": None, "seeds": "5", "n": 5, "reproduced": None}
    shown = {"estimate": estimate, "low": estimate - 1, "high": estimate + 1, "verdict": verdict}
    return {**common, **shown, "method": method, "task": task, "baseline": "base" if verdict else None}


def test_methods_share_the_axis_of_a_task_and_a_baseline_keeps_its_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[tuple[float, str]]] = {}

    def draw_dot(ax: Axes, y: float, value: float, low: Any, high: Any, colour: str, face: str = "") -> None:
        drawn.setdefault(str(id(ax)), []).append((value, to_hex(colour)))

    monkeypatch.setattr(study_pages, "draw_dot", draw_dot)
    tasks = [f"task {i}" for i in range(8)]  # more than methods, and than panels in a row
    entries = [
        *(entry("base", task, 10.0 * i) for i, task in enumerate(tasks)),
        *(entry("other", task, 10.0 * i + 1, "level") for i, task in enumerate(tasks)),
    ]
    study_pages.draw({"entries": entries}, tmp_path / "chart.png")
    expected = [{(10.0 * i, study_pages.BASELINE), (10.0 * i + 1, study_pages.COLOURS["level"])} for i in range(8)]
    assert [set(dots) for dots in drawn.values()] == expected and (tmp_path / "chart.png").exists()


def test_a_reproduced_score_does_not_hide_that_the_method_is_behind(tmp_path: Path) -> None:
    reached = {"method": "x", "task": "a", "reproduced": True, "verdict": None}
    (tmp_path / "good.json").write_text(json.dumps({"entries": [reached]}))
    (tmp_path / "bad.json").write_text(
        json.dumps({"entries": [reached, {**reached, "task": "b", "verdict": "behind"}]})
    )
    assert evidence(["good/x"], tmp_path) == "reproduced" and evidence(["bad/x"], tmp_path) == "behind"
