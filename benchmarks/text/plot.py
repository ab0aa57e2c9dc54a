"""Plot of the table: accuracy of every recipe on the common tasks, and the verdict on its claim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from matplotlib.lines import Line2D

from benchmarks.text.cell import TASKS
from benchmarks.text.claims import CONFIRMED, OPPOSITE, UNSEEN
from robopolicy.evaluation.plots import INK, PALETTE, panels

COLOURS = {CONFIRMED: PALETTE[1], OPPOSITE: PALETTE[4], UNSEEN: PALETTE[0]}
LINES: dict[str, tuple[Literal[":", "-"], str]] = {
    "(imitation)": (":", "imitation, from which all start"),
    "grpo": ("-", "GRPO"),
}
ROW = 0.17  # [inch]


def plot(figures: Mapping[str, Any], path: Path) -> Path:
    """Draw a row per recipe and a column per task, the best of the first task on top.

    Args:
        figures: Result of `table.figures`.
        path: PNG to write.
    """
    tasks = [name for name, task in TASKS.items() if not task.recipes and name in figures]
    names = {recipe for task in tasks for recipe, entry in figures[task].items() if "accuracy" in entry} - {*LINES}
    order = sorted(names, key=lambda name: [_accuracy(figures[task], name) for task in tasks])
    with panels(path, 4.6 * len(tasks) + 1.4, ROW * len(order) + 1.6, 1, len(tasks)) as axes:
        for ax, task in zip(axes[0], tasks, strict=True):
            entries = figures[task]
            for name, (style, _) in LINES.items():
                ax.axvline(100 * _accuracy(entries, name), color=INK, linestyle=style, linewidth=1.0, zorder=0)
            for place, name in enumerate(order):
                if "accuracy" not in entries.get(name, {}):
                    continue
                found, colour = entries[name]["accuracy"], COLOURS.get(entries[name]["claim"]["verdict"], INK)
                ax.hlines(place, 100 * found["low"], 100 * found["high"], color=colour, linewidth=1.6)
                ax.plot(100 * found["value"], place, "o", color=colour, markersize=4)
            ax.set(title=task, xlabel="accuracy [%]", ylim=(-1, len(order)))
            ax.grid(axis="x")
        axes[0, 0].set_yticks(range(len(order)), order, fontsize=7)
        keys = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in COLOURS.items()]
        keys += [Line2D([], [], color=INK, marker="o", label="no verdict, or here the same as another")]
        keys += [Line2D([], [], color=INK, linestyle=style, label=label) for style, label in LINES.values()]
        axes[0, 0].figure.legend(handles=keys, loc="outside lower center", ncols=3, title="what a recipe claims is")
    return path


def _accuracy(entries: Mapping[str, Any], name: str) -> float:
    return entries.get(name, {}).get("accuracy", {}).get("value", 0.0)
