"""Reports of a finished search: its table, its plot over the weights, and a JSON summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from robopolicy.atomic import write_text
from robopolicy.evaluation.plots import GRID, INK, MUTED, PALETTE, figure
from robopolicy.evaluation.report import percent
from robopolicy.evaluation.search.methods import Weights
from robopolicy.evaluation.search.weights import Candidate, WeightSearch, score
from robopolicy.plurals import counted

MAX_ROWS = 16  # candidates in a plot for three or more policies
MEASURED, CHOSEN = PALETTE[0], PALETTE[1]


def search_table(found: WeightSearch, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per candidate; `names` are the composed policies."""
    header = [*(f"weight of {name}" for name in names), "episodes", f"{_what(found)} [95 %]", ""]
    rows = [
        [
            *(f"{weight:.3g}" for weight in candidate.weights),
            str(candidate.result.n),
            percent(score(candidate.result)) if _is_rate(found) else f"{score(candidate.result):.4g}",
            "chosen" if candidate.weights == found.weights else "",
        ]
        for candidate in found.candidates
    ]
    return header, rows


def write_table(found: WeightSearch, names: Sequence[str], path: Path) -> Path:
    """Write one CSV row per candidate."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(f"weight {name}" for name in names), "episodes", "score", "low", "high", "return", "chosen"])
    for row in search_summary(found)["candidates"]:
        numbers = [row[key] for key in ("episodes", "score", "low", "high", "return")]
        writer.writerow([*row["weights"], *numbers, int(row["chosen"])])
    write_text(path, text.getvalue())
    return path


def search_summary(found: WeightSearch) -> dict[str, Any]:
    """Return JSON-ready results of a search."""
    return {
        "method": found.method,
        "weights": list(found.weights),
        "planned_episodes": found.plan.episodes,
        "played_episodes": sum(candidate.result.n for candidate in found.candidates),
        "first_seed": found.seeds.start,
        "seeds": len(found.seeds),
        "candidates": [_row(candidate, found.weights) for candidate in found.candidates],
    }


def weight_curve(found: WeightSearch, names: Sequence[str], path: Path) -> Path:
    """Draw the score with its interval over the weights and mark the choice; returns the path.

    With two policies it is a curve over the first weight, otherwise a list of the best candidates.
    """
    draw = _draw_curve if len(names) == 2 else _draw_list
    rows = 1 if len(names) == 2 else min(len(found.candidates), MAX_ROWS)
    size = (6.0, 3.6) if len(names) == 2 else (7.2, 1.3 + 0.27 * rows)
    with figure(path, *size) as ax:
        draw(ax, found, names, 100.0 if _is_rate(found) else 1.0)
        episodes, seeds = counted(found.plan.episodes, "episode"), counted(found.plan.seeds, "seed")
        ax.set_title(f"{found.method} search: {episodes} on {seeds}")
    return path


def _draw_curve(ax: Axes, found: WeightSearch, names: Sequence[str], scale: float) -> None:
    candidates = sorted(found.candidates, key=lambda candidate: candidate.weights[0])
    most = max(candidate.result.n for candidate in candidates)
    full = [candidate for candidate in candidates if candidate.result.n == most]  # these share all their seeds
    x = np.array([candidate.weights[0] for candidate in full])
    bands = [score(candidate.result) for candidate in full]
    ax.plot(x, [scale * band.estimate for band in bands], color=MEASURED, linewidth=1.6, zorder=1)
    for candidate in candidates:
        _whisker(ax, candidate, found, candidate.weights[0], scale, most, vertical=True)
    ax.axvline(found.weights[0], color=CHOSEN, linewidth=1.2, linestyle=(0, (3, 3)), zorder=0)
    ticks = np.linspace(0, 1, 6)
    labels = [f"{tick:.1f}" for tick in ticks]
    labels[0], labels[-1] = f"0\n{_short(names[1])}", f"1\n{_short(names[0])}"
    ax.set_xticks(ticks, labels)
    ax.set(xlim=(-0.06, 1.06), xlabel=f"weight of {_short(names[0])}", ylabel=_axis(found))
    if _is_rate(found):
        ax.set(ylim=(-3, 103), yticks=range(0, 101, 25))
    ax.grid(axis="y")
    if len(full) < len(candidates):
        note = f"faint: dropped before {counted(most, 'episode')}"
        ax.text(0.99, 0.02, note, transform=ax.transAxes, ha="right", color=MUTED, fontsize=8.5)


def _draw_list(ax: Axes, found: WeightSearch, names: Sequence[str], scale: float) -> None:
    candidates = sorted(
        found.candidates, key=lambda c: (c.weights != found.weights, -c.result.n, -score(c.result).estimate, c.weights)
    )[:MAX_ROWS]
    most = max(candidate.result.n for candidate in candidates)
    for row, candidate in enumerate(candidates):
        _whisker(ax, candidate, found, -row, scale, most, vertical=False)
    labels = ["  ".join(f"{weight:.2f}" for weight in candidate.weights) for candidate in candidates]
    ax.set_yticks([-row for row in range(len(candidates))], labels)
    ax.tick_params(axis="y", labelcolor=INK, labelsize=8.5)
    ax.set(ylim=(-len(candidates) + 0.4, 0.6), xlabel=_axis(found), ylabel=" / ".join(_short(name) for name in names))
    ax.grid(axis="x", color=GRID)
    if len(candidates) < len(found.candidates):
        note = f"{len(candidates)} of {counted(len(found.candidates), 'candidate')}"
        ax.text(0.99, 0.02, note, transform=ax.transAxes, ha="right", color=MUTED, fontsize=8.5)


def _whisker(
    ax: Axes, candidate: Candidate, found: WeightSearch, place: float, scale: float, most: int, *, vertical: bool
) -> None:
    """Draw a candidate: a dot for its score, a line for its interval; fainter with fewer episodes."""
    band, chosen = score(candidate.result), candidate.weights == found.weights
    colour, alpha = CHOSEN if chosen else MEASURED, 1.0 if candidate.result.n == most else 0.45
    line, middle = ax.vlines if vertical else ax.hlines, scale * band.estimate
    line(place, scale * band.low, scale * band.high, color=colour, linewidth=2.4 if chosen else 1.6, alpha=alpha)
    x, y = (place, middle) if vertical else (middle, place)
    ax.plot(x, y, "o", color=colour, markersize=8 if chosen else 5, alpha=alpha, zorder=3)


def _row(candidate: Candidate, chosen: Weights) -> dict[str, Any]:
    band = score(candidate.result)
    return {
        "weights": list(candidate.weights),
        "episodes": candidate.result.n,
        "score": band.estimate,
        "low": None if np.isnan(band.low) else band.low,
        "high": None if np.isnan(band.high) else band.high,
        "return": float(candidate.result.returns.mean()),
        "chosen": candidate.weights == chosen,
    }


def _is_rate(found: WeightSearch) -> bool:
    return found.candidates[0].result.success is not None


def _what(found: WeightSearch) -> str:
    return "success" if _is_rate(found) else "return"


def _axis(found: WeightSearch) -> str:
    return _what(found) + (" [%]" if _is_rate(found) else "")


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"
