"""From cells to the table: accuracy, pass@k, entropy and dead groups with intervals over seeds and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from robopolicy.evaluation.intervals import Interval, wilson

Cell = dict[str, Any]
WIDEST = 8  # k of the second pass@k


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and recipe, the base first."""
    table: list[dict[str, object]] = []
    for task in dict.fromkeys(cell["task"] for cell in cells):
        inside = [cell for cell in cells if cell["task"] == task]
        table.append(_row(task, "(imitation)", 1, inside[:1], "base", None))
        for recipe in dict.fromkeys(cell["recipe"] for cell in inside):
            runs = [cell for cell in inside if cell["recipe"] == recipe]
            played = [run for run in runs if not run["refused"]]
            if played:
                dead = fmean(run["degenerate"] for run in played)
                table.append(_row(task, recipe, len(played), played, "after", dead))
            else:
                blank = dict.fromkeys(
                    ("accuracy", "pass@1", f"pass@{WIDEST}", "entropy", "dead groups", "seconds"), "-"
                )
                table.append({"task": task, "recipe": f"{recipe} (refused)", "seeds": 0, **blank})
    return table


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task and recipe."""
    result: dict[str, Any] = {"seeds": sorted({cell["seed"] for cell in cells})}
    for task in dict.fromkeys(cell["task"] for cell in cells):
        inside = [cell for cell in cells if cell["task"] == task]
        entries: dict[str, Any] = {"(imitation)": _figures(inside[:1], "base")}
        for recipe in dict.fromkeys(cell["recipe"] for cell in inside):
            played = [cell for cell in inside if cell["recipe"] == recipe and not cell["refused"]]
            if played:
                entries[recipe] = _figures(played, "after") | {
                    "degenerate": fmean(run["degenerate"] for run in played),
                    "tokens": fmean(run["tokens"] for run in played),
                    "gain": _accuracy(played, "after").estimate - _accuracy(played, "base").estimate,
                }
            else:
                entries[recipe] = {"refused": next(run["refused"] for run in inside if run["recipe"] == recipe)}
        result[task] = entries
    return result


def _row(task: str, recipe: str, seeds: int, runs: Sequence[Cell], stage: str, dead: float | None) -> dict[str, object]:
    return {
        "task": task,
        "recipe": recipe,
        "seeds": seeds,
        "accuracy": f"{_accuracy(runs, stage):.1%}",
        "pass@1": f"{_mean(runs, stage, 1):.1%}",
        f"pass@{WIDEST}": f"{_mean(runs, stage, WIDEST):.1%}",
        "entropy": round(fmean(run[stage]["entropy"] for run in runs), 3),
        "dead groups": "-" if dead is None else f"{dead:.0%}",
        "seconds": "-" if dead is None else round(fmean(run["seconds"] for run in runs)),
    }


def _figures(runs: Sequence[Cell], stage: str) -> dict[str, Any]:
    accuracy = _accuracy(runs, stage)
    return {
        "accuracy": {"value": accuracy.estimate, "low": accuracy.low, "high": accuracy.high},
        "by_seed": [run[stage]["correct"] / run[stage]["n"] for run in runs],
        "pass_at": {str(k): _mean(runs, stage, k) for k in (1, WIDEST)},
        "entropy": fmean(run[stage]["entropy"] for run in runs),
    }


def _accuracy(runs: Sequence[Cell], stage: str) -> Interval:
    """Pooled over seeds and prompts, with its Wilson interval."""
    return wilson(sum(run[stage]["correct"] for run in runs), sum(run[stage]["n"] for run in runs))


def _mean(runs: Sequence[Cell], stage: str, k: int) -> float:
    return fmean(run[stage]["pass_at"][str(k)]["value"] for run in runs)
