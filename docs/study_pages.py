"""Chart and table of a study, from its committed result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.worldmodel.table import CORRELATIONS
from docs.dot_charts import ROW, draw_dot, name_rows, style_axis
from docs.markdown import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PERCENT = ("success", "accuracy")  # measures that are shown in percent
COLOURS = {"ahead": "#1f9d8f", "behind": "#d9592b", "level": "#5d6878"}
OTHER = "#aab2bf"  # too few seeds, not applicable, diverged
BASELINE, PUBLISHED = "#1d2530", "#5b6ee1"
MEASURE = ": "  # between a task and a further measure, in the name of a column
PANEL = 1.75  # inches
COLUMNS = 6  # of panels, at most
INTERVAL_SEEDS = 3  # with fewer, an interval covers the panel and is not drawn
MOST_LINES = 2  # of baselines in a panel
MARKS = {"ahead": "**ahead**", "behind": "**behind**", "level": "level", "diverged": "diverged"}

Entry = Mapping[str, Any]


def is_study(record: Mapping[str, Any]) -> bool:
    """Whether a result is the table of a study."""
    return "entries" in record


def caption(record: Mapping[str, Any]) -> str:
    """Sentences about the numbers of the table."""
    grid, methods, tasks = _grid(record["entries"])
    seeds = "" if min(len(methods), len(tasks)) == 1 else ", and the number of seeds in parentheses"
    unfinished = any(" of " in entry["seeds"] for entry in grid.values())
    seeds += "; of two numbers, the second is planned" if unfinished else ""
    compared = any(entry["baseline"] for entry in grid.values())
    verdicts = f" Verdicts are corrected for the whole table (Holm). {null_arm(record)}" if compared else ""
    return f"Means over training seeds with 95 % intervals{seeds}.{verdicts}"


def null_arm(record: Mapping[str, Any]) -> str:
    """Sentence about the false positives of the table."""
    rate = record["null"]
    if rate is None:
        return "The null arm is missing: it needs ten runs of a baseline."
    some, every = record["null_covers"]
    covers = "" if some == every else f"; it covers {some} of {every} comparisons"
    return (
        f"Null arm: {rate['table']:.1%} of {rate['tables']} tables from random splits of the baseline's runs contain a "
        f"difference{covers}."
    )


def summary(record: Mapping[str, Any]) -> str:
    """Table with one row per method and one column per task, or the reverse where tasks are more.

    A study of one task or one method also shows its intervals and further columns.
    """
    grid, methods, tasks = _grid(record["entries"])
    if len(tasks) == 1:
        return _of_one_task(record, grid, tasks[0])
    if len(methods) == 1:
        return _of_one_method(record)
    if len(tasks) > len(methods):
        rows = [[task, *(_cell(grid.get((method, task))) for method in methods)] for task in tasks]
        return table(["task", *methods], rows)
    baselines = {method: _baselines(record["entries"], method) for method in methods}
    rows = [[f"`{m}`", baselines[m], *(_cell(grid.get((m, task))) for task in tasks)] for m in methods]
    return table(["method", "against", *tasks], rows)


def _of_one_task(record: Mapping[str, Any], grid: Mapping[tuple[str, str], Entry], task: str) -> str:
    further = _further(record)
    rows = [
        [
            *(f"`{row['method']}`", str(row["baseline"]), str(row["seeds"]), str(row["score [95 %]"])),
            MARKS.get(grid[row["method"], task]["verdict"] or "", "-"),
            *(str(row[name]) for name in further),
        ]
        for row in record["rows"]
    ]
    return table(["method", "against", "seeds", f"{task} [95 %]", "verdict", *further], rows)


def _of_one_method(record: Mapping[str, Any]) -> str:
    further, score = _further(record), "score [95 %]"
    rows = [[str(row[name]) for name in ("task", "seeds", score, *further)] for row in record["rows"]]
    return table(["task", "seeds", f"{record['entries'][0]['measure']} [95 %]", *further], rows)


def _further(record: Mapping[str, Any]) -> list[str]:
    """Published scores, if there are any, and the columns that only this study has."""
    names = list(record["rows"][0])
    published = ["published"] if any(entry["published"] for entry in record["entries"]) else []
    return published + names[names.index("published") + 1 :]


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw means over seeds with 95 % intervals, coloured by verdict; lines are baselines, diamonds published.

    Every task has a panel with all methods; where there is one method alone, the tasks share a panel. A further measure
    of a task has a panel of its own, with the differences to the baselines.
    """
    from robopolicy.evaluation.plots import panels

    grid, methods, tasks = _grid(record["entries"])
    if len(methods) == 1:
        grid, methods, tasks = {(task, method): entry for (method, task), entry in grid.items()}, tasks, methods
    colours = {method: _colour(method, grid) for method in methods}
    order = sorted(methods, key=lambda method: _place(method, methods, tasks, grid, colours))
    columns = min(len(tasks), COLUMNS)
    rows = math.ceil(len(tasks) / columns)
    width, height = 2.2 + PANEL * columns, rows * (1.5 + ROW * len(order))
    with panels(path, max(width, 5.5), height, rows, columns, sharex=False) as axes:
        for ax in axes.flat[len(tasks) :]:
            ax.set_axis_off()
        for ax, task in zip(axes.flat, tasks, strict=False):
            found = {method: grid[method, task] for method in order if (method, task) in grid}
            _draw_panel(ax, task, found, order, colours)
        for first in axes[:, 0]:
            name_rows(first, order)
        _draw_legend(axes[0, 0].figure, record["entries"])


def _draw_panel(
    ax: Axes, task: str, found: Mapping[str, Entry], order: Sequence[str], colours: Mapping[str, str]
) -> None:
    from robopolicy.evaluation.plots import MUTED

    difference = MEASURE in task
    measure = next(iter(found.values()))["measure"]
    found = {name: entry for name, entry in found.items() if entry["estimate"] is not None}
    scale = 100 if measure in PERCENT else 1
    baselines = {entry["baseline"] for entry in found.values()} & found.keys()
    lines = [0.0] if difference else [scale * found[name]["estimate"] for name in baselines]
    for x in lines if len(lines) <= MOST_LINES else ():
        ax.axvline(x, color=MUTED, linewidth=1.0, zorder=0)
    for method, entry in found.items():
        y, colour = order.index(method), colours[method] if entry["verdict"] is None else _verdict_colour(entry)
        shown = entry["comparison"]["difference"] if difference and entry.get("comparison") else entry
        few = entry["n"] < INTERVAL_SEEDS or shown["low"] is None
        low, high = (None if few else scale * shown[bound] for bound in ("low", "high"))
        draw_dot(ax, y, scale * shown["estimate"], low, high, colour, "white" if colour == OTHER else "")
        if entry["published"]:
            ax.plot(scale * entry["published"]["estimate"], y, "D", color=PUBLISHED, markersize=4)
    ax.set_title(task.partition(MEASURE)[0], fontsize=9)
    unit = " [%]" if scale == 100 else ""
    label = f"{measure}{unit}{', minus baseline' if difference else ''}"
    style_axis(ax, label, percent=scale == 100 and not difference)
    if measure in CORRELATIONS and not difference:
        ax.set_xlim(min(-0.04, ax.get_xlim()[0]), 1.04)  # a narrow range would exaggerate differences


def _draw_legend(figure: Any, entries: Sequence[Entry]) -> None:
    """Name the colours that the chart uses."""
    from matplotlib.lines import Line2D

    verdicts = {entry["verdict"] for entry in entries}
    shown = [(name, colour, colour) for name, colour in COLOURS.items() if name in verdicts]
    if verdicts - {None, *COLOURS}:
        shown.append(("no verdict", OTHER, "white"))
    if any(entry["baseline"] for entry in entries):
        shown.append(("baseline", BASELINE, BASELINE))
    handles = [Line2D([], [], color=c, markerfacecolor=f, marker="o", markersize=4, label=n) for n, c, f in shown]
    if any(entry["published"] for entry in entries):
        handles.append(Line2D([], [], color=PUBLISHED, marker="D", linestyle="", markersize=4, label="published"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)


def _verdict_colour(entry: Entry) -> str:
    return COLOURS.get(entry["verdict"], OTHER)


def _colour(method: str, grid: Mapping[tuple[str, str], Entry]) -> str:
    """Colour of a method where its entry has no verdict: the colour of its only verdict, or the one of baselines."""
    colours = {_verdict_colour(e) for (name, _), e in grid.items() if name == method and e["verdict"] is not None}
    return BASELINE if not colours else colours.pop() if len(colours) == 1 else OTHER


def _grid(entries: Sequence[Entry]) -> tuple[dict[tuple[str, str], Entry], list[str], list[str]]:
    """Entries by method and column, and both in their order; a second measure has a column of its own."""
    first = {entry["task"]: entry["measure"] for entry in reversed(entries)}
    found: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        same = entry["measure"] == first[entry["task"]]
        column = entry["task"] if same else f"{entry['task']}{MEASURE}{entry['measure']}"
        found[entry["method"], column] = entry
    methods, tasks = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    return found, methods, tasks


def _place(
    method: str,
    methods: Sequence[str],
    tasks: Sequence[str],
    grid: Mapping[tuple[str, str], Entry],
    colours: Mapping[str, str],
) -> tuple[bool, float, int]:
    """Key that puts baselines at the bottom and the best result of the first task on top."""
    entry = grid.get((method, tasks[0]))
    return colours[method] != BASELINE, -math.inf if entry is None else entry["estimate"], -methods.index(method)


def _baselines(entries: Sequence[Entry], method: str) -> str:
    found = dict.fromkeys(e["baseline"] for e in entries if e["method"] == method and e["baseline"])
    return ", ".join(f"`{name}`" for name in found) or "-"


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    measure, published = entry["measure"], entry["published"]
    if entry["estimate"] is None:
        return f"no value ({entry['seeds']})"
    unit = "%" if measure in PERCENT else ""
    text = f"{_number(entry['estimate'], measure)}{unit}"
    if entry["low"] is not None:
        text += f" [{_number(entry['low'], measure)}, {_number(entry['high'], measure)}]"
    reported = f" published {_number(published['estimate'], measure)}{unit}" if published else ""
    mark = MARKS.get(entry["verdict"] or "")
    return f"{text} ({entry['seeds']}){reported}" + (f" {mark}" if mark else "")


def _number(value: float, measure: str) -> str:
    if measure in PERCENT:
        return f"{100 * value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
