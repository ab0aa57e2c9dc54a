"""Plot of the table: the accuracy of every arm with its verdict, and the learning curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from matplotlib.lines import Line2D

from benchmarks.text.recipes import BASELINE, NULL
from benchmarks.text.table import BASE
from benchmarks.text.tasks import TASKS
from robopolicy.evaluation.plots import INK, PALETTE, panels

COLORS = {"ahead": PALETTE[1], "behind": PALETTE[4], "level": PALETTE[0]}
LINES: dict[str, tuple[Literal[":", "-"], str]] = {
    BASE: (":", "imitation, from which all start"),
    BASELINE: ("-", "GRPO"),
}
ROW = 0.17  # [inch]


def plot(figures: Mapping[str, Any], path: Path) -> Path:
    """Draw a row per arm and a column per task, the best on top, above the learning curves.

    Args:
        figures: Result of `table.figures`.
        path: PNG to write.
    """
    tasks = [task for task in TASKS if task in figures]
    most = max(len(figures[task]) for task in tasks)
    with panels(path, 4.6 * len(tasks) + 1.4, ROW * most + 5.6, 2, len(tasks)) as axes:
        for column, task in enumerate(tasks):
            entries = figures[task]
            _draw_accuracy(axes[0, column], task, entries)
            _draw_curves(axes[1, column], entries)
        keys = [Line2D([], [], color=color, marker="o", label=name) for name, color in COLORS.items()]
        keys += [Line2D([], [], color=INK, marker="o", label="no verdict")]
        keys += [Line2D([], [], color=INK, linestyle=style, label=label) for style, label in LINES.values()]
        axes[0, 0].figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return path


def _draw_accuracy(ax: Any, task: str, entries: Mapping[str, Any]) -> None:
    order = sorted(entries.keys() - LINES.keys(), key=lambda arm: entries[arm]["accuracy"]["value"])
    for arm, (style, _) in LINES.items():
        if arm in entries:
            ax.axvline(100 * entries[arm]["accuracy"]["value"], color=INK, linestyle=style, linewidth=1.0, zorder=0)
    for place, arm in enumerate(order):
        found, color = entries[arm]["accuracy"], _color(entries[arm])
        low, high = (found["value"] if found[side] is None else found[side] for side in ("low", "high"))
        ax.hlines(place, 100 * low, 100 * high, color=color, linewidth=1.6)
        ax.plot(100 * found["value"], place, "o", color=color, markersize=4)
    ax.set_yticks(range(len(order)), ["GRPO, other seeds" if arm == NULL else arm for arm in order], fontsize=7)
    ax.set(title=task, xlabel="held-out accuracy [%]", ylim=(-1, max(len(order), 1)))
    ax.grid(axis="x")


def _draw_curves(ax: Any, entries: Mapping[str, Any]) -> None:
    for arm, entry in entries.items():
        if "curve" in entry:
            tokens, accuracy = zip(*entry["curve"], strict=True)
            first = arm == BASELINE
            ax.plot(
                [count / 1000 for count in tokens],
                [100 * value for value in accuracy],
                color=INK if first else _color(entry),
                linewidth=2.0 if first else 0.8,
                zorder=3 if first else 1,
            )
    ax.set(xlabel="generated tokens [thousands]", ylabel="held-out accuracy [%]")
    ax.grid()


def _color(entry: Mapping[str, Any]) -> Any:
    return COLORS.get(entry.get("verdict", {}).get("verdict", ""), INK)
