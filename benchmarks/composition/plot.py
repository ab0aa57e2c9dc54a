"""Plot of success over the weight of the first parent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.study import Cell
from robopolicy.evaluation.intervals import Interval, wilson
from robopolicy.evaluation.plots import learning_curves


def plot(cells: Sequence[Cell], path: Path) -> Path:
    """Draw success over the weight of the first parent (convex operator), one line per task."""
    tasks = dict.fromkeys(cell["task"] for cell in cells)
    lines = {
        task: [
            [
                {"weight of the first parent": weight, "success": band.estimate, "low": band.low, "high": band.high}
                for weight, band in curve([cell for cell in cells if cell["task"] == task], "convex").items()
            ]
        ]
        for task in tasks
    }
    title = "Convex weights, episodes of the search"
    return learning_curves(
        lines, path, x="weight of the first parent", y="success", low="low", high="high", title=title
    )


def curve(cells: Sequence[Cell], operator: str) -> dict[float, Interval]:
    """Success by weight of the first parent, over the search episodes of all seeds."""
    pooled: dict[float, list[int]] = {}
    for cell in cells:
        for weight, outcomes in cell["curves"][operator]:
            pooled.setdefault(weight, []).extend(outcomes)
    return {weight: wilson(sum(outcomes), len(outcomes)) for weight, outcomes in sorted(pooled.items())}
