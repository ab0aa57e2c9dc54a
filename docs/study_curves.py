"""Learning curves of a study, from its committed result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.study_pages import BASELINE, INTERVAL_SEEDS, OTHER, PERCENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 5  # methods of a panel that have a colour and a name
COLUMNS = 3
COLOURS = ("#1f9d8f", "#d9822b", "#5b6ee1", "#c2487d", "#6b9e3f", "#7a5c3e", "#3d8fc4", "#a3478f")
PANEL = (3.3, 2.6)  # inches

Entry = Mapping[str, Any]


def has_curves(record: Mapping[str, Any]) -> bool:
    """Whether a result has learning curves."""
    return any(entry.get("curve") for entry in record.get("entries", ()))


def draw_curves(record: Mapping[str, Any], path: Path) -> None:
    """Draw the mean over seeds of every method in one panel per task.

    The best methods of a task, by their last score, and the baseline have colours, names and 95 % bands; the others are
    grey. A method has the same colour in all panels, the first baseline is black.
    """
    from robopolicy.evaluation.plots import panels

    tasks = list(dict.fromkeys(entry["task"] for entry in record["entries"] if entry.get("curve")))
    named = {task: _best(_curves(record, task)) for task in tasks}
    order = list(dict.fromkeys(method for methods in named.values() for method in methods))
    baselines = {entry["baseline"] for entry in record["entries"]}
    first = next((method for method in order if method in baselines), None)
    others = [method for method in order if method != first]
    colours = {method: COLOURS[i] if i < len(COLOURS) else OTHER for i, method in enumerate(others)}
    colours |= {} if first is None else {first: BASELINE}
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    with panels(
        path, PANEL[0] * columns + 0.6, PANEL[1] * rows + 0.7, rows, columns, sharex=False, sharey=False
    ) as axes:
        for ax, task in zip(axes.flat, tasks, strict=False):
            _draw(ax, task, _curves(record, task), named[task], colours)
        for ax in axes.flat[len(tasks) :]:
            ax.set_axis_off()
        for ax in axes[-1]:
            ax.set_xlabel(record["curve_unit"], fontsize=8)
        _legend(axes[0, 0].figure, {method: colours[method] for method in order if colours[method] != OTHER})


def _curves(record: Mapping[str, Any], task: str) -> list[Entry]:
    return [entry for entry in record["entries"] if entry["task"] == task and entry.get("curve")]


def _best(entries: Sequence[Entry]) -> list[str]:
    """The methods with the highest last scores, and the baselines with a curve."""
    ranked = sorted(entries, key=lambda entry: -entry["curve"][-1][1])
    baselines = {entry["baseline"] for entry in entries}
    return list(dict.fromkeys(e["method"] for e in [*ranked[:NAMED], *(e for e in ranked if e["method"] in baselines)]))


def _draw(ax: Axes, task: str, entries: Sequence[Entry], named: Sequence[str], colours: Mapping[str, str]) -> None:
    scale = 100 if entries[0]["measure"] in PERCENT else 1
    for entry in sorted(entries, key=lambda entry: entry["method"] in named):
        x, *score = zip(*entry["curve"], strict=True)
        mean, low, high = ([None if value is None else scale * value for value in bound] for bound in score)
        colour = colours.get(entry["method"], OTHER) if entry["method"] in named else OTHER
        front = colour != OTHER
        ax.plot(x, mean, color=colour, linewidth=1.7 if front else 0.8, zorder=3 if front else 1)
        if front and entry["n"] >= INTERVAL_SEEDS and None not in low:
            ax.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0, zorder=2)
    ax.set_title(task, fontsize=9)
    ax.set_ylabel(f"{entries[0]['measure']}{' [%]' if scale == 100 else ''}", fontsize=8)
    if scale == 100:
        ax.set_ylim(-3, 103)
    ax.grid(axis="y")
    ax.tick_params(labelsize=7)
    ax.tick_params(axis="y", labelleft=True)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value / 1000:g}k")


def _legend(figure: Any, colours: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=1.7, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
