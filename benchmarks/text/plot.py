"""Plot of the study: the accuracy of every arm with its verdict, and the learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.lines import Line2D

from benchmarks.study_table import Entry, StudyTable
from benchmarks.text.recipes import BASELINE
from benchmarks.text.study import IMITATION
from robopolicy.evaluation.plots import INK, PALETTE, panels

COLORS = {"ahead": PALETTE[1], "behind": PALETTE[4], "level": PALETTE[0]}
LINES: dict[str, tuple[Literal[":", "-"], str]] = {
    IMITATION: (":", "imitation, from which all start"),
    BASELINE: ("-", "GRPO"),
}
ROW = 0.17  # [inch]


def plot(table: StudyTable, path: Path) -> Path:
    """Draw a row per arm and a column per task, the best on top, above the learning curves."""
    tasks = list(dict.fromkeys(entry.task for entry in table.entries))
    of_task = {task: [entry for entry in table.entries if entry.task == task] for task in tasks}
    most = max(map(len, of_task.values()))
    with panels(path, 4.6 * len(tasks) + 1.4, ROW * most + 5.6, 2, len(tasks)) as axes:
        for column, (task, entries) in enumerate(of_task.items()):
            _draw_accuracy(axes[0, column], task, entries)
            _draw_curves(axes[1, column], entries)
        keys = [Line2D([], [], color=color, marker="o", label=name) for name, color in COLORS.items()]
        keys += [Line2D([], [], color=INK, marker="o", label="no verdict")]
        keys += [Line2D([], [], color=INK, linestyle=style, label=label) for style, label in LINES.values()]
        axes[0, 0].figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return path


def _draw_accuracy(ax: Any, task: str, entries: Sequence[Entry]) -> None:
    order = sorted((entry for entry in entries if entry.method not in LINES), key=lambda entry: entry.score.estimate)
    for entry in entries:
        if entry.method in LINES:
            style = LINES[entry.method][0]
            ax.axvline(100 * entry.score.estimate, color=INK, linestyle=style, linewidth=1.0, zorder=0)
    for place, entry in enumerate(order):
        score, color = entry.score, _color(entry)
        if not np.isnan(score.low):
            ax.hlines(place, 100 * score.low, 100 * score.high, color=color, linewidth=1.6)
        ax.plot(100 * score.estimate, place, "o", color=color, markersize=4)
    ax.set_yticks(range(len(order)), [entry.method for entry in order], fontsize=7)
    ax.set(title=task, xlabel="held-out accuracy [%]", ylim=(-1, max(len(order), 1)))
    ax.grid(axis="x")


def _draw_curves(ax: Any, entries: Sequence[Entry]) -> None:
    """Mean curves over the seeds; all curves have the same number of points."""
    for entry in entries:
        curves = [score.curve for score in entry.scores if score.curve]
        if curves:
            tokens, accuracy = np.array(curves).mean(0).T
            first = entry.method == BASELINE
            style = {"linewidth": 2.0, "zorder": 3} if first else {"linewidth": 0.8, "zorder": 1}
            ax.plot(tokens / 1000, 100 * accuracy, color=INK if first else _color(entry), **style)
    ax.set(xlabel="generated tokens [thousands]", ylabel="held-out accuracy [%]")
    ax.grid()


def _color(entry: Entry) -> Any:
    return COLORS.get("" if entry.verdict is None else entry.verdict.verdict, INK)
