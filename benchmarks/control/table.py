"""Table from cells: scores over tasks and seeds with intervals, and comparisons with the baseline.

Scores are normalised per task (`tasks.py`), and all tasks with runs of a learner have the same weight, over the seeds
that these tasks share. A run that diverged scores 0, as do random actions. A learner is compared with its baseline on
their common tasks: ahead where the interval of its probability of improvement (Agarwal et al. 2021) is above one half,
behind where it is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.control.methods import FAMILIES, METHODS, Family
from benchmarks.control.tasks import TASKS
from robopolicy.evaluation.intervals import (
    Interval,
    iqm,
    probability_of_improvement,
    stratified_gap,
    stratified_iqm,
)
from robopolicy.evaluation.plots import curve_grid

Cell = dict[str, Any]
Runs = dict[str, list[Cell]]  # of one method, by task
ENOUGH = 3  # runs per task; fewer are too few for a bootstrap


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The numbers of the table by family and method, for programs."""
    references = {task.name: {"0": task.random, "1": task.expert} for task in TASKS.values()}
    result: dict[str, Any] = {"seeds": sorted({cell["seed"] for cell in cells}), "references": references}
    for family in FAMILIES:
        methods = _methods(cells, family)
        entries: dict[str, Any] = {}
        for name, runs in methods.items():
            better = improvement(runs, methods.get(family.baseline, {}), name)
            scores = _scores(equal(runs))
            entries[name] = {
                "score": _plain(stratified_iqm(scores)) if scores else None,
                "optimality_gap": _plain(stratified_gap(scores)) if scores else None,
                "tasks": len(scores),
                "seeds": len(scores[0]) if scores else 0,
                "diverged": sum(bool(run["diverged"]) for part in runs.values() for run in part),
                "better_than_baseline": None if better is None else _plain(better),
                "verdict": verdict(better),
                "returns": {task: [run["return"] for run in part] for task, part in runs.items()},
                "seconds": median(run["seconds"] for part in runs.values() for run in part),
            }
        result[family.name] = {"env_steps": family.env_steps, "methods": entries}
    return result


def rows(found: dict[str, Any]) -> list[dict[str, object]]:
    """One row per method of `figures`, the baseline of each family first."""
    return [
        {
            "family": family.name,
            "method": name,
            "tasks": entry["tasks"],
            "seeds": entry["seeds"],
            "diverged": entry["diverged"],
            "score, IQM [95 %]": _text(entry["score"]),
            "optimality gap [95 %]": _text(entry["optimality_gap"]),
            "P(better) [95 %]": _text(entry["better_than_baseline"]),
            "verdict": entry["verdict"],
            **{task: f"{iqm(entry['returns'][task]):.0f}" if task in entry["returns"] else "-" for task in TASKS},
            "seconds": round(entry["seconds"]),
        }
        for family in FAMILIES
        for name, entry in found[family.name]["methods"].items()
    ]


def equal(runs: Runs) -> Runs:
    """The runs of the seeds that every task has; empty if there are none."""
    common = set.intersection(*({run["seed"] for run in part} for part in runs.values()))
    return {task: [run for run in part if run["seed"] in common] for task, part in runs.items()} if common else {}


def improvement(runs: Runs, baseline: Runs, name: str) -> Interval | None:
    """Probability that a run beats one of the baseline; None for the baseline itself and with too few runs."""
    common = [task for task in TASKS if task in runs and task in baseline]
    if (
        METHODS[name].is_baseline
        or min((len(side[task]) for side in (runs, baseline) for task in common), default=0) < ENOUGH
    ):
        return None
    return probability_of_improvement(*(_scores({task: side[task] for task in common}) for side in (baseline, runs)))


def verdict(better: Interval | None) -> str:
    """Ahead, level or behind."""
    if better is None:
        return "-"
    return "ahead" if better.low > 0.5 else "behind" if better.high < 0.5 else "level"


def plot(cells: Sequence[Cell], family: Family, path: Path) -> Path | None:
    """Plot the curves of every method and of the baseline, one column per method and one row per task."""
    methods = _methods(cells, family)
    baseline = methods.pop(family.baseline, {})
    if not methods:
        return None
    tasks = [task for task in TASKS if any(task in runs for runs in (baseline, *methods.values()))]
    grid = {
        name: {
            task: {
                label: _curves(side[task])
                for label, side in ((family.baseline, baseline), ("the learner named above", runs))
                if task in side
            }
            for task in tasks
        }
        for name, runs in methods.items()
    }
    return curve_grid(grid, path, x="environment steps", y="return", ylabel="return")


def _of(cells: Sequence[Cell], family: Family) -> list[Cell]:
    return [cell for cell in cells if cell["family"] == family.name]


def _methods(cells: Sequence[Cell], family: Family) -> dict[str, Runs]:
    found: dict[str, Runs] = {}
    for cell in _of(cells, family):
        found.setdefault(cell["method"], {}).setdefault(cell["task"], []).append(cell)
    return {name: found[name] for name in METHODS if name in found}


def _scores(runs: Runs) -> list[list[float]]:
    return [[TASKS[task].score(run["return"]) for run in part] for task, part in runs.items()]


def _curves(runs: Sequence[Cell]) -> list[list[dict[str, float]]]:
    played = [run["curve"] for run in runs if run["curve"]]  # a diverged run may have none
    return [[{"environment steps": steps, "return": value} for steps, value in curve] for curve in played]


def _text(interval: dict[str, float] | None) -> str:
    return "-" if interval is None else "{value:.2f} [{low:.2f}, {high:.2f}]".format(**interval)


def _plain(interval: Interval) -> dict[str, float]:
    return {"value": interval.estimate, "low": interval.low, "high": interval.high}
