"""Charts of tables that are no studies: one dot per row and column, with the interval that the table states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs.dot_charts import ROW, draw_dot, name_rows, style_axis

Row = Mapping[str, Any]
COLOURS = ("#1f9d8f", "#5b6ee1", "#d9592b", "#5d6878")
NUMBER = r"[+-]?\d[\d,]*\.?\d*(?:e-?\d+)?"
SHOWN = re.compile(rf"({NUMBER})[%x]?(?: \[({NUMBER})[%x]?, ({NUMBER})[%x]?\])?")
PANEL = 2.3  # inches


@dataclass(frozen=True)
class Chart:
    """What a chart shows of a table."""

    label: Sequence[str]  # columns that name a row
    values: Sequence[str]  # columns with a dot each
    unit: str  # of the horizontal axis
    panel: str = ""  # column with one panel per value
    where: Mapping[str, object] = field(default_factory=dict[str, object])  # rows that it shows
    bounds: tuple[str, str] | None = None  # columns of the interval, if it is not in the text of the value
    log: bool = False
    one: bool = False  # mark 1 on the axis
    shared: bool = True  # one horizontal scale for all panels


CHARTS = {
    "demo": Chart(["seed"], ["base", "fine-tuned"], "success [%]"),
    "update_time": Chart(["method"], ["of DPPO's"], "time of an update, in DPPO's", panel="width", log=True, one=True),
    "ppo_vs_sb3": Chart(["learner"], ["seconds, median"], "seconds of a run", panel="task", shared=False),
    "rsl_rl": Chart(
        ["learner"],
        ["simulating [s]", "rest of the rollout [s]", "updating [s]"],
        "seconds per update",
        panel="environment",
        log=True,
    ),
    "walking": Chart(["command or robot"], ["success [95 %]"], "success [%]"),
    "world_throughput": Chart(
        ["source"], ["frames/s"], "frames/s", panel="task", where={"environments": 64, "threads": 2}, log=True
    ),
    "sim_throughput": Chart(
        ["simulator"], ["env steps/s (median)"], "environment steps/s", bounds=("smallest", "largest")
    ),
    "replay": Chart(["windows"], ["ms to write a step", "ms to draw"], "milliseconds", panel="environments", log=True),
    "overlap": Chart(["learner"], ["wall time", "CPU time"], "time with overlap / without", one=True),
    "latency": Chart(["policy"], ["faster by"], "faster than torch by", log=True, one=True),
    "safety_filter": Chart(
        ["limits"], ["p50 [ms]", "p99 [ms]", "p99.9 [ms]", "maximum [ms]"], "milliseconds per tick", log=True
    ),
    "compiling": Chart(
        ["phase", "way"], ["faster than float32"], "faster than float32 by", panel="network", log=True, one=True
    ),
    "experts": Chart(["task"], ["success [95 %]"], "success [%]"),
}


def value(row: Row, column: str, bounds: tuple[str, str] | None = None) -> tuple[float, float | None, float | None]:
    """The number of a cell and its interval, if one is stated; raises ValueError for cells without a number."""
    if bounds is not None:
        return float(row[column]), float(row[bounds[0]]), float(row[bounds[1]])
    found = SHOWN.match(str(row[column]))
    if found is None:
        raise ValueError(f"'{row[column]}' in column '{column}' is no number.")
    number, low, high = (None if text is None else float(text.replace(",", "")) for text in found.groups())
    assert number is not None
    return number, low, high


def shown(chart: Chart, rows: Sequence[Row]) -> list[Row]:
    """The rows that a chart shows."""
    return [row for row in rows if all(row[column] == wanted for column, wanted in chart.where.items())]


def draw(chart: Chart, rows: Sequence[Row], path: Path) -> None:
    """Write a chart of a table."""
    from matplotlib.lines import Line2D

    from robopolicy.evaluation.plots import panels

    rows = shown(chart, rows)
    labels = list(dict.fromkeys(_label(chart, row) for row in rows))[::-1]
    parts = list(dict.fromkeys(row[chart.panel] for row in rows)) if chart.panel else [""]
    width, height = 2.0 + max(PANEL * len(parts), 3.5), 1.2 + ROW * max(len(labels), 3)
    with panels(path, width, height, 1, len(parts), sharex=chart.shared) as axes:
        for ax, part in zip(axes[0], parts, strict=True):
            _draw_panel(ax, chart, [row for row in rows if not chart.panel or row[chart.panel] == part], labels)
            ax.set_title(_heading(chart, part), fontsize=9)
        name_rows(axes[0, 0], labels)
        if len(chart.values) > 1:
            handles = [
                Line2D([], [], color=colour, marker="o", markersize=4, label=name)
                for name, colour in zip(chart.values, COLOURS, strict=False)
            ]
            axes[0, 0].figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def _draw_panel(ax: Any, chart: Chart, rows: Sequence[Row], labels: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    from robopolicy.evaluation.plots import MUTED

    if chart.log:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if chart.one else (1,)))
        ax.xaxis.set_minor_locator(NullLocator())
    if chart.one:
        ax.axvline(1, color=MUTED, linewidth=1.0, zorder=0)
    for row in rows:
        y = labels.index(_label(chart, row))
        for column, colour in zip(chart.values, COLOURS, strict=False):
            draw_dot(ax, y, *value(row, column, chart.bounds), colour)
    ax.margins(x=0.08)
    percent = "[%]" in chart.unit
    style_axis(ax, chart.unit, percent=percent)
    if not percent and not chart.log:
        ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if ax.get_xlim()[1] >= 1000 else "{x:g}"))


def _label(chart: Chart, row: Row) -> str:
    words = ", ".join(str(row[column]) for column in chart.label)
    return f"{chart.label[0]} {words}" if words.isdigit() else words


def _heading(chart: Chart, part: object) -> str:
    return f"{chart.panel}: {part}" if isinstance(part, int) else str(part)
