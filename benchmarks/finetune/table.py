"""Table from cells: success (or return) before and after with intervals over seeds and episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from robopolicy.evaluation.intervals import stratified_iqm, wilson

Cell = dict[str, Any]


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and method."""
    table: list[dict[str, object]] = []
    for (task, method), runs in _grouped(cells).items():
        table.append(
            {
                "task": task,
                "method": method,
                "seeds": len(runs),
                "before": _rate(runs, "base"),
                "after": _rate(runs, "finetuned"),
                "last": _value(runs, "last"),
                "steps to 90 %": _steps(runs),
                "seconds": round(median(run["seconds"] for run in runs)),
                "updating s": round(median(run["seconds_updating"] for run in runs), 1),
                "network calls per action": round(runs[0]["finetuned"]["network_calls_per_action"], 2),
            }
        )
    return table


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task and method."""
    result: dict[str, Any] = {"seeds": sorted({cell["seed"] for cell in cells})}
    for (task, method), runs in _grouped(cells).items():
        entry: dict[str, Any] = {
            "seeds": len(runs),
            "seconds": median(run["seconds"] for run in runs),
            "seconds_updating": median(run["seconds_updating"] for run in runs),
            "steps_to_goal": [run["steps_to_goal"] for run in runs],
            "env_steps": median(run["env_steps"] for run in runs),
        }
        for stage in ("base", "finetuned", "last"):
            interval = _interval(runs, stage)
            if interval is not None:
                entry[stage] = {"value": interval[0], "low": interval[1], "high": interval[2]}
        result.setdefault(task, {})[method] = entry
    return result


def _grouped(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["method"]), []).append(cell)
    return groups


def _interval(runs: Sequence[Cell], stage: str) -> tuple[float, float, float] | None:
    """Pooled success with its Wilson interval, or the interquartile mean of the returns over seeds.

    With one seed, the interval of a return is over its episodes.
    """
    summaries = [run[stage] for run in runs if run[stage] is not None]
    if not summaries:
        return None
    if summaries[0]["success"] is None:
        if len(summaries) == 1:
            return tuple(summaries[0][key] for key in ("return_mean", "return_low", "return_high"))
        score = stratified_iqm([[summary["return_mean"] for summary in summaries]])
        return score.estimate, score.low, score.high
    count = sum(summary["n"] for summary in summaries)
    rate = wilson(round(sum(summary["success"] * summary["n"] for summary in summaries)), count)
    return rate.estimate, rate.low, rate.high


def _rate(runs: Sequence[Cell], stage: str) -> str:
    interval = _interval(runs, stage)
    if interval is None:
        return "-"
    value, low, high = (_number(runs, number) for number in interval)
    text = f"{value} [{low}, {high}]"
    if runs[0]["finetuned"]["success"] is None:
        return text
    rates = " ".join(f"{run[stage]['success']:.0%}" for run in runs if run[stage] is not None)
    return f"{text} ({rates})"


def _value(runs: Sequence[Cell], stage: str) -> str:
    interval = _interval(runs, stage)
    assert interval is not None
    return _number(runs, interval[0])


def _number(runs: Sequence[Cell], value: float) -> str:
    """A success in percent, or a return."""
    return f"{value:.0f}" if runs[0]["finetuned"]["success"] is None else f"{value:.1%}"


def _steps(runs: Sequence[Cell]) -> str:
    """Median steps to the goal over seeds (infinite if not reached), and the number of seeds that reach it."""
    if runs[0]["finetuned"]["success"] is None:
        return "-"
    found = [math.inf if run["steps_to_goal"] is None else run["steps_to_goal"] for run in runs]
    reached = sum(map(math.isfinite, found))
    middle = median(found)
    text = f"{middle:,.0f}" if math.isfinite(middle) else f"> {median(run['env_steps'] for run in runs):,.0f}"
    return f"{text} ({reached} of {len(found)})"
