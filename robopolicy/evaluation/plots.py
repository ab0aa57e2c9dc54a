"""Plots of evaluation results and learning curves; every function writes one PNG and returns its path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from robopolicy.evaluation.intervals import Interval, bootstrap_mean, student_mean
from robopolicy.evaluation.ranking import Ranking
from robopolicy.evaluation.result import Comparison
from robopolicy.plurals import counted
from robopolicy.worldmodel.success_detectors.clips import Reliability

Runs = Sequence[Sequence[Mapping[str, Any]]]
"""Metric rows, as in `metrics.jsonl`, per seed."""

PALETTE = ("#8a94a6", "#1f9d8f", "#d9822b", "#5b6ee1", "#c2487d", "#6b9e3f")  # the first is the baseline, in grey
BAND = 8  # columns of a grid per band
INK, MUTED, GRID = "#1d2530", "#6a7482", "#e4e8ee"
BOTH, GAINED, LOST, NEITHER = "#b9e3d8", "#1f9d8f", "#e2544c", "#e9ecf1"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@contextmanager
def panels(
    path: Path, width: float, height: float, rows: int, columns: int, *, sharex: bool = True, sharey: bool = True
) -> Iterator[NDArray[Any]]:
    """Yield axes `(rows, columns)` in the common style and write them to `path`; sizes in inches, no display needed.

    All axes share the horizontal scale, and the axes of a row the vertical one, unless told otherwise.
    """
    with mpl.rc_context(_STYLE):
        fig = Figure((width, height), layout="constrained")
        FigureCanvasAgg(fig)
        yield fig.subplots(rows, columns, squeeze=False, sharex=sharex, sharey="row" if sharey else False)
        fig.savefig(path, dpi=160, metadata={"Software": None})  # the same file from every version of the library


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Yield a single panel."""
    with panels(path, width, height, 1, 1) as axes:
        yield axes[0, 0]


def success_bars(results: Mapping[str, Interval], path: Path, *, title: str = "Success") -> Path:
    """Draw success rates with their Wilson intervals, one bar per policy."""
    with figure(path, max(4.2, 1.9 + 1.15 * len(results)), 3.4) as ax:
        for i, (label, interval) in enumerate(results.items()):
            colour = _colour(i, len(results))
            ax.bar(i, 100 * interval.estimate, width=0.5, color=colour, alpha=0.9)
            ax.vlines(i, 100 * interval.low, 100 * interval.high, color=INK, linewidth=1.6)
            ax.hlines([100 * interval.low, 100 * interval.high], i - 0.06, i + 0.06, color=INK, linewidth=1.6)
            ax.annotate(
                f"{100 * interval.estimate:.0f} %",
                (i + 0.07, 100 * interval.estimate),
                (0, 4),
                textcoords="offset points",
                ha="left",
                fontweight="bold",
            )
            ax.text(i, -14, f"n = {interval.n}", ha="center", color=MUTED, fontsize=8.5)
            ax.text(i, -7, label, ha="center", va="center", fontsize=10)
        ax.set(ylim=(0, 112), xlim=(-0.6, len(results) - 0.4), yticks=range(0, 101, 25), xticks=[])
        ax.set_title(f"{title} (lines: 95 % interval)")
        ax.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
        ax.set_xlabel(" \n ")  # space for the names
        ax.grid(axis="y")
        ax.spines["left"].set_visible(False)
    return path


def paired_outcomes(comparison: Comparison, first: str, second: str, path: Path) -> Path:
    """Draw one cell per seed, coloured by which of two policies succeeded."""
    if comparison.outcomes is None:
        raise ValueError("The task defines no success, so there are no outcomes to pair.")
    a, b = comparison.outcomes[:, 0], comparison.outcomes[:, 1]
    kind = np.select([a & b, b & ~a, a & ~b], [0, 1, 2], default=3)
    kind = np.sort(kind)  # grouped, so that areas are comparable
    columns = max(10, math.ceil(math.sqrt(2 * kind.size)))
    rows = math.ceil(kind.size / columns)
    cells = np.full(rows * columns, np.nan)
    cells[: kind.size] = kind
    colours, names = (BOTH, GAINED, LOST, NEITHER), ("both", f"only {second}", f"only {first}", "neither")
    with figure(path, 5, 1.1 + 5 * rows / columns) as ax:
        grid = np.ma.masked_invalid(cells.reshape(rows, columns))
        ax.pcolormesh(grid[::-1], cmap=ListedColormap(colours), vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=1.5)
        handles = [
            Patch(color=c, label=f"{name}: {int((kind == k).sum())}")
            for k, (c, name) in enumerate(zip(colours, names, strict=True))
        ]
        _legend(ax, handles, ncols=2, handlelength=1, handleheight=1)
        ax.set(title=f"Success on the {counted(kind.size, 'common seed')}", xticks=[], yticks=[], aspect="equal")
        ax.spines[:].set_visible(False)
    return path


def histogram(values: Mapping[str, NDArray[Any]], path: Path, *, title: str, xlabel: str) -> Path:
    """Draw the distribution of one number per episode and policy, with the mean and its interval above."""
    everything = np.concatenate(list(values.values()))
    edges, colours = _bins(everything), [_colour(i, len(values)) for i in range(len(values))]
    with figure(path, 5, 3.4) as ax:
        counts, _, _ = ax.hist(list(values.values()), edges, color=colours, label=list(values), rwidth=0.9)
        top = float(np.max(np.asarray(counts)))
        for i, (data, colour) in enumerate(zip(values.values(), colours, strict=True)):
            mean, height = bootstrap_mean(data), top * (1.1 + 0.09 * i)
            ax.hlines(height, mean.low, mean.high, color=colour, linewidth=2)
            ax.plot(mean.estimate, height, "o", color=colour, markersize=6)
        ax.set(title=title, xlabel=f"{xlabel} (dots: mean with 95 % interval)", ylabel="episodes")
        room = max((edges[-1] - edges[0]) / 20, float(len(edges) == 2))
        ax.set(xlim=(edges[0] - room, edges[-1] + room), ylim=(0, top * (1.15 + 0.09 * len(values))))
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_yticks([tick for tick in ax.get_yticks() if tick <= top])  # no ticks next to the means
        if np.issubdtype(everything.dtype, np.integer):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(axis="y")
        if len(values) > 1:
            _legend(ax)
    return path


def learning_curves(
    runs: Mapping[str, Runs],
    path: Path,
    *,
    x: str = "update",
    y: str = "eval/success",
    low: str = "eval/low",
    high: str = "eval/high",
    title: str = "Learning curve",
    ylabel: str = "success",
    percent: bool = True,
) -> Path:
    """Draw logged scalars with intervals.

    A single run per label has its own interval (keys `low`, `high`). Several have the mean and Student's interval over
    runs, at the steps of the shortest run with linear interpolation of the others. Rows without `y` are skipped.
    """
    scale, bounds = (100.0, (0.0, 1.0)) if percent else (1.0, (-math.inf, math.inf))
    with figure(path, 5, 3.4) as ax:
        for i, (label, seeds) in enumerate(runs.items()):
            _draw_curve(ax, _curve(seeds, x, y, low, high, bounds), _colour(i, len(runs)), label, scale)
        ax.set(title=title, xlabel=x.replace("_", " "), ylabel=f"{ylabel} [%]" if percent else ylabel)
        if percent:
            ax.set(ylim=(-2, 103), yticks=range(0, 101, 25))
        ax.grid(axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.xaxis.set_major_formatter(lambda value, _: _short(value))
        if len(runs) > 1:
            _legend(ax)
    return path


def curve_grid(
    grid: Mapping[str, Mapping[str, Mapping[str, Runs]]], path: Path, *, x: str, y: str, ylabel: str
) -> Path:
    """Draw a grid of small learning curves, each with the mean and Student's interval over runs.

    `grid` maps column, row and label to runs, as in `learning_curves`; all columns have the same rows, and a panel may
    be empty. Columns beyond eight continue in another band below, with the same axes.
    """
    rows = list(next(iter(grid.values())))
    bands = math.ceil(len(grid) / BAND)
    width = math.ceil(len(grid) / bands)
    with panels(path, 1.2 + 1.9 * width, 0.8 + 1.7 * len(rows) * bands, len(rows) * bands, width) as axes:
        for (index, (column, cells)), (i, row) in product(enumerate(grid.items()), enumerate(rows)):
            band, j = divmod(index, width)
            ax: Axes = axes[band * len(rows) + i, j]
            for k, (label, runs) in enumerate(cells[row].items()):
                _draw_curve(ax, _curve(runs, x, y, y, y), _colour(k, 2), label)
            ax.set(title=column if i == 0 else "", ylabel=f"{row}\n{ylabel}" if j == 0 else "")
            if i == len(rows) - 1:
                ax.set_xlabel(x.replace("_", " "))
                ax.tick_params(labelbottom=True)
            ax.grid(axis="y")
            ax.xaxis.set_major_formatter(lambda value, _: _short(value))
        for i in range(len(rows)):
            same = axes[i :: len(rows), 0]  # axes of one row in all bands
            low, high = zip(*(ax.get_ylim() for ax in same), strict=True)
            for ax in same:
                ax.set_ylim(min(low), max(high))
        for ax in axes[-len(rows) :, len(grid) - (bands - 1) * width :].flat:
            ax.set_axis_off()
        _legend(axes[0, 0])
    return path


def rank_scatter(ranking: Ranking, path: Path, *, ylabel: str = "predicted") -> Path:
    """Draw real and predicted values of every policy with intervals; perfect predictions are on the diagonal."""
    with figure(path, 4.6, 4.4) as ax:
        for i, (name, x, y) in enumerate(zip(ranking.names, ranking.real, ranking.predicted, strict=True)):
            colour = PALETTE[1 + i % (len(PALETTE) - 1)]
            ax.hlines(y.estimate, x.low, x.high, color=colour, alpha=0.5)
            ax.vlines(x.estimate, y.low, y.high, color=colour, alpha=0.5)
            ax.plot(x.estimate, y.estimate, "o", color=colour, markersize=6)
            ax.annotate(name, (x.estimate, y.estimate), (5, 4), textcoords="offset points", fontsize=8, color=MUTED)
        ax.axline((0, 0), slope=1, color=PALETTE[0], linestyle="--", linewidth=1, zorder=0)
        lines = [f"{key} {value:.2f}" for key, value in ranking.metrics.items() if key in ("pearson", "mmrv")]
        ax.set(title="\n".join(lines) or f"{len(ranking.names)} policies", xlabel="real", ylabel=ylabel)
        ax.grid()
    return path


def reliability_diagram(curves: Mapping[str, Reliability], path: Path) -> Path:
    """Draw the observed frequency over the predicted probability; larger dots have more samples."""
    with figure(path, 4.6, 4.2) as ax:
        ax.axline((0, 0), slope=1, color=PALETTE[0], linestyle="--", linewidth=1, zorder=0)
        for i, (label, curve) in enumerate(curves.items()):
            colour, size = PALETTE[1 + i % (len(PALETTE) - 1)], 20 + 180 * curve.count / curve.count.sum()
            ax.plot(curve.confidence, curve.frequency, color=colour, linewidth=1.4)
            ax.scatter(curve.confidence, curve.frequency, size, color=colour, label=f"{label}: error {curve.error:.3f}")
        ax.set(title="Calibration", xlabel="predicted probability", ylabel="observed frequency")
        ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        ax.grid()
        _legend(ax)
    return path


def _bins(values: NDArray[Any]) -> list[float]:
    """Return the edges of at most thirty bins, at half-integers for integer values."""
    count = min(30, max(8, values.size // 8))
    if not np.issubdtype(values.dtype, np.integer):
        return np.histogram_bin_edges(values, bins=count).tolist()
    low, high = int(values.min()), int(values.max())
    width = math.ceil((high - low + 1) / count)
    return [low - 0.5 + width * i for i in range((high - low) // width + 2)]


def _draw_curve(ax: Axes, curve: tuple[np.ndarray, ...], colour: str, label: str, scale: float = 1.0) -> None:
    steps, middle, bottom, top = curve
    if steps.size == 1:  # neither a line nor a band would be visible
        ax.plot(steps, scale * middle, color=colour, linestyle="none", marker="o", markersize=7, label=label)
        ax.vlines(steps, scale * bottom, scale * top, color=colour, linewidth=2, alpha=0.5)
        return
    ax.plot(steps, scale * middle, color=colour, linewidth=2, marker="o", markersize=3.5, label=label)
    ax.fill_between(steps, scale * bottom, scale * top, color=colour, alpha=0.18, linewidth=0)


def _curve(
    seeds: Runs, x: str, y: str, low: str, high: str, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, centre, lower and upper end `(T,)` of one label; intervals over runs stay within `bounds`."""
    kept = [[row for row in rows if row.get(y) is not None and row.get(x) is not None] for rows in seeds]
    if not any(kept):
        raise ValueError(f"No row has both '{x}' and '{y}'.")
    if len(kept) == 1:
        rows = kept[0]
        steps, middle = (np.array([row[key] for row in rows], dtype=float) for key in (x, y))
        bottom, top = (np.array([row.get(key, row[y]) for row in rows], dtype=float) for key in (low, high))
        return steps, middle, bottom, top
    runs = [np.array([(row[x], row[y]) for row in rows], dtype=float).reshape(-1, 2) for rows in kept]
    steps = _common_steps([run[:, 0] for run in runs])
    if not steps.size:
        raise ValueError(f"The runs share no range of '{x}'.")
    table = np.stack([np.interp(steps, run[:, 0], run[:, 1]) for run in runs])  # (runs, T)
    bands = [student_mean(column).within(*bounds) for column in table.T]
    bottom, top = (np.array([getattr(band, end) for band in bands]) for end in ("low", "high"))
    return steps, table.mean(0), bottom, top


def _common_steps(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the steps `(T,)` of the run that ends first (with the fewest steps of several) within all runs."""
    if not all(run.size for run in runs):
        return np.empty(0)
    first = min(runs, key=lambda run: (run[-1], run.size))
    return first[first >= max(run[0] for run in runs)]


def _legend(ax: Axes, handles: Sequence[Patch] | None = None, ncols: int = 3, **options: Any) -> None:
    """Put the legend below the plot."""
    chosen = handles or ax.get_legend_handles_labels()[0]
    ax.get_figure().legend(handles=chosen, loc="outside lower center", ncols=ncols, **options)  # type: ignore[union-attr]


def _colour(i: int, n: int) -> str:
    """Return the accent colour for a single policy; several start with the grey of the baseline."""
    return PALETTE[(i + (n == 1)) % len(PALETTE)]


def _short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
