"""Tables from cells: parents and compositions with intervals, paired tests, the curve over the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.composition.cell import OPERATORS, SEARCHED
from benchmarks.composition.tasks import TASKS
from robopolicy.evaluation.intervals import Interval, PairedDifference, bootstrap_mean, paired_difference, wilson
from robopolicy.evaluation.plots import learning_curves
from robopolicy.evaluation.result import format_p

Cell = Mapping[str, Any]


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and policy; differences are to the better parent of the task, on the same episodes."""
    table: list[dict[str, object]] = []
    for task, runs in _by_task(cells).items():
        better = better_parent(runs)
        table += [
            {
                "task": task,
                "policy": name,
                "weight of the first": _weights(runs, name),
                "success [95 %]": f"{rate(runs, name):.1%}",
                "return [95 %]": f"{returns(runs, name):.3f}",
                "by seed": " ".join(f"{np.mean(_outcomes(run, name, _measure(runs))):.0%}" for run in runs),
                "minus better parent [95 %]": "-" if name == better else _text(difference(runs, better, name)),
                "gained / lost": "-" if name in runs[0]["parents"] else "{} / {}".format(*_gained(runs, name)),
                "time / parents": _ratio(runs, name),
            }
            for name in (*runs[0]["parents"], *OPERATORS)
        ]
    return table


def curve_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task, operator and weight of the first parent, on the search episodes."""
    return [
        {
            "task": task,
            "operator": operator,
            "weight of the first": weight,
            "measure": _measure(runs),
            "found [95 %]": f"{interval:.1%}",
            "episodes": interval.n,
        }
        for task, runs in _by_task(cells).items()
        for operator in SEARCHED
        for weight, interval in curve(runs, operator).items()
    ]


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task."""
    result: dict[str, Any] = {"seeds": sorted({cell["seed"] for cell in cells}), "tasks": {}}
    for task, runs in _by_task(cells).items():
        better = better_parent(runs)
        entry: dict[str, Any] = {
            "parents": list(runs[0]["parents"]),
            "better_parent": better,
            "measure": _measure(runs),
            "seconds": median(run["seconds"] for run in runs),
            "policies": {},
        }
        for name in (*runs[0]["parents"], *OPERATORS):
            found = rate(runs, name)
            entry["policies"][name] = {"success": found.estimate, "low": found.low, "high": found.high, "n": found.n}
            entry["policies"][name]["return"] = returns(runs, name).estimate
            if name != better:
                paired = difference(runs, better, name)
                entry["policies"][name]["minus_better_parent"] = {
                    "value": paired.difference.estimate,
                    "low": paired.difference.low,
                    "high": paired.difference.high,
                    "p": paired.p_value,
                }
            if name in OPERATORS:
                entry["policies"][name]["latency_ratio"] = median(run["latency"]["ratio"][name] for run in runs)
            if name in SEARCHED:
                entry["policies"][name]["weights"] = [run["weights"][name] for run in runs]
        result["tasks"][task] = entry
    return result


def plot(cells: Sequence[Cell], path: Path) -> Path:
    """Draw the task's measure over the weight of the first parent (convex operator), one line per task."""
    lines = {
        task if _measure(runs) == "success" else f"{task} ({_measure(runs)})": [
            [
                {"weight of the first parent": weight, "success": band.estimate, "low": band.low, "high": band.high}
                for weight, band in curve(runs, "convex").items()
            ]
        ]
        for task, runs in _by_task(cells).items()
    }
    title = "Convex weights, episodes of the search"
    return learning_curves(
        lines, path, x="weight of the first parent", y="success", low="low", high="high", title=title
    )


def rate(runs: Sequence[Cell], name: str) -> Interval:
    """Success over the held-out episodes of all seeds."""
    pooled = _pooled(runs, name)
    return wilson(int(pooled.sum()), len(pooled))


def returns(runs: Sequence[Cell], name: str) -> Interval:
    """Mean return over the held-out episodes of all seeds."""
    return bootstrap_mean(_pooled(runs, name, "return"))


def better_parent(runs: Sequence[Cell]) -> str:
    """The parent with the better held-out result, which compositions are compared with."""
    return max(runs[0]["parents"], key=lambda name: _pooled(runs, name, _measure(runs)).mean())


def difference(runs: Sequence[Cell], first: str, second: str) -> PairedDifference:
    """Second minus first on the held-out episodes of all seeds, in the task's measure."""
    measure = _measure(runs)
    return paired_difference(_pooled(runs, first, measure), _pooled(runs, second, measure))


def curve(runs: Sequence[Cell], operator: str) -> dict[float, Interval]:
    """The task's measure by weight of the first parent, over the search episodes of all seeds."""
    measure = _measure(runs)
    pooled: dict[float, list[float]] = {}
    for run in runs:
        for point in run["curves"][operator]:
            pooled.setdefault(point["weight"], []).extend(point[measure])
    found = sorted(pooled.items())
    if measure == "success":
        return {weight: wilson(int(sum(outcomes)), len(outcomes)) for weight, outcomes in found}
    return {weight: bootstrap_mean(outcomes) for weight, outcomes in found}


def _gained(runs: Sequence[Cell], name: str) -> tuple[int, int]:
    """Episodes in which the composition alone succeeded, and in which it failed although both parents succeeded."""
    first, second = (_pooled(runs, parent) for parent in runs[0]["parents"])
    composed = _pooled(runs, name)
    return int((composed & ~first & ~second).sum()), int((~composed & first & second).sum())


def _by_task(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["task"], []).append(cell)
    return groups


def _measure(runs: Sequence[Cell]) -> str:
    """Measure that compares the policies of a task: success or return."""
    return TASKS[runs[0]["task"]].measure


def _outcomes(run: Cell, name: str, measure: str) -> np.ndarray:
    return np.array(run["held_out"][name][measure], bool if measure == "success" else float)


def _pooled(runs: Sequence[Cell], name: str, measure: str = "success") -> np.ndarray:
    return np.concatenate([_outcomes(run, name, measure) for run in runs])


def _weights(runs: Sequence[Cell], name: str) -> str:
    if name not in SEARCHED:
        return "-"
    return " ".join(f"{run['weights'][name][0]:.1f}" for run in runs)


def _ratio(runs: Sequence[Cell], name: str) -> str:
    if name not in OPERATORS:
        return "-"
    return f"{median(run['latency']['ratio'][name] for run in runs):.2f}"


def _text(paired: PairedDifference) -> str:
    gain = paired.difference
    return f"{gain.estimate:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}], {format_p(paired.p_value)}"
