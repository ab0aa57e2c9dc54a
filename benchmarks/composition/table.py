"""Tables from cells: parents and compositions with verdicts over seeds, the null arm, the curve over the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.composition.cell import AGAIN, ENSEMBLE, OPERATORS, SEARCHED
from robopolicy.evaluation.comparison import SeedRuns, TableVerdict, judge, seed_interval
from robopolicy.evaluation.intervals import Interval, wilson
from robopolicy.evaluation.plots import learning_curves

Cell = Mapping[str, Any]
SAME_PATH = 0.05  # disagreement of the parents below which their composition can change nothing


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and policy; compositions are compared with the better parent, the null arm with its original."""
    found = verdicts(cells)
    table: list[dict[str, object]] = []
    for task, tasks_runs in _by_task(cells).items():
        for name in policies(tasks_runs):
            verdict = found.get((task, name)) or null_verdicts(cells).get((task, name))
            table.append(
                {
                    "task": task,
                    "policy": name,
                    "weight of the first": _weights(tasks_runs, name),
                    "success [95 %]": f"{rate(tasks_runs, name):.1%}",
                    "by seed": " ".join(f"{success(run, name).mean():.0%}" for run in tasks_runs),
                    "difference [95 %]": _difference(verdict),
                    "verdict": "-" if verdict is None else verdict.verdict,
                    "gained / lost": "{} / {}".format(*_gained(tasks_runs, name)) if name in OPERATORS else "-",
                    "time / parents": _ratio(tasks_runs, name),
                }
            )
    return table


def notes(cells: Sequence[Cell]) -> list[str]:
    """The null arm, and the disagreement of the parents along the path of a sample."""
    null = null_verdicts(cells)
    tested = [verdict for verdict in null.values() if verdict.comparison is not None]
    wrong = sum(verdict.verdict in ("ahead", "behind") for verdict in tested)
    lines = [f"Null arm: {wrong} of {len(tested)} parents trained again with another seed differ from the original."]
    for task, tasks_runs in _by_task(cells).items():
        path = np.mean([run["disagreement"] for run in tasks_runs], 0)
        lines.append(
            f"- {task}: velocities of the parents differ by {path[0]:.0%} at noise, {path[-1]:.0%} at the chunk."
        )
    return lines


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task."""
    result: dict[str, Any] = {"seeds": sorted({cell["seed"] for cell in cells}), "tasks": {}}
    found, null = verdicts(cells), null_verdicts(cells)
    for task, tasks_runs in _by_task(cells).items():
        entry: dict[str, Any] = {
            "parents": list(tasks_runs[0]["parents"]),
            "better_parent": better_parent(tasks_runs),
            "seconds": median(run["seconds"] for run in tasks_runs),
            "disagreement": np.mean([run["disagreement"] for run in tasks_runs], 0),
            "policies": {},
        }
        for name in policies(tasks_runs):
            verdict = found.get((task, name)) or null.get((task, name))
            entry["policies"][name] = {"success": rate(tasks_runs, name).to_dict()}
            if verdict is not None:
                entry["policies"][name]["verdict"] = verdict.to_dict()
            if name in OPERATORS:
                entry["policies"][name]["latency_ratio"] = median(run["latency"]["ratio"][name] for run in tasks_runs)
            if name in SEARCHED:
                entry["policies"][name]["weights"] = [run["weights"][name] for run in tasks_runs]
        result["tasks"][task] = entry
    return result


def verdicts(cells: Sequence[Cell]) -> dict[tuple[str, str], TableVerdict]:
    """Verdict on every composition, against the better parent of its task, with Holm's correction over the table."""
    pairs = {}
    for task, tasks_runs in _by_task(cells).items():
        better = _seed_runs(tasks_runs, better_parent(tasks_runs))
        same = max(max(run["disagreement"]) for run in tasks_runs) < SAME_PATH
        reason = "the parents agree along the path" if same else ""
        for name in (*OPERATORS, ENSEMBLE):
            method = _seed_runs(tasks_runs, name)
            pairs[task, name] = SeedRuns(method.outcomes, reason=reason if name in OPERATORS else ""), better
    return judge(pairs)


def null_verdicts(cells: Sequence[Cell]) -> dict[tuple[str, str], TableVerdict]:
    """Verdict on every parent that was trained again with another seed, against the original."""
    return judge(
        {
            (task, AGAIN): (_seed_runs(runs, AGAIN), _seed_runs(runs, runs[0]["parents"][0]))
            for task, runs in _by_task(cells).items()
        }
    )


def policies(tasks_runs: Sequence[Cell]) -> tuple[str, ...]:
    """Names in the order of the table."""
    return (*tasks_runs[0]["parents"], AGAIN, ENSEMBLE, *OPERATORS)


def curve_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task, operator and weight of the first parent, on the search episodes."""
    return [
        {
            "task": task,
            "operator": operator,
            "weight of the first": weight,
            "success [95 %]": f"{interval:.1%}",
            "episodes": interval.n,
        }
        for task, tasks_runs in _by_task(cells).items()
        for operator in SEARCHED
        for weight, interval in curve(tasks_runs, operator).items()
    ]


def plot(cells: Sequence[Cell], path: Path) -> Path:
    """Draw success over the weight of the first parent (convex operator), one line per task."""
    lines = {
        task: [
            [
                {"weight of the first parent": weight, "success": band.estimate, "low": band.low, "high": band.high}
                for weight, band in curve(tasks_runs, "convex").items()
            ]
        ]
        for task, tasks_runs in _by_task(cells).items()
    }
    title = "Convex weights, episodes of the search"
    return learning_curves(
        lines, path, x="weight of the first parent", y="success", low="low", high="high", title=title
    )


def rate(tasks_runs: Sequence[Cell], name: str) -> Interval:
    """Success over seeds."""
    return seed_interval(_seed_runs(tasks_runs, name).outcomes)


def better_parent(tasks_runs: Sequence[Cell]) -> str:
    """The parent with the better held-out result, which compositions are compared with."""
    return max(tasks_runs[0]["parents"], key=lambda name: np.mean([success(run, name).mean() for run in tasks_runs]))


def curve(tasks_runs: Sequence[Cell], operator: str) -> dict[float, Interval]:
    """Success by weight of the first parent, over the search episodes of all seeds."""
    pooled: dict[float, list[int]] = {}
    for run in tasks_runs:
        for point in run["curves"][operator]:
            pooled.setdefault(point["weight"], []).extend(point["success"])
    return {weight: wilson(sum(outcomes), len(outcomes)) for weight, outcomes in sorted(pooled.items())}


def success(run: Cell, name: str) -> np.ndarray:
    """Success `(n,)` bool of the held-out episodes of a policy."""
    return np.array(run["held_out"][name]["success"], bool)


def _seed_runs(tasks_runs: Sequence[Cell], name: str) -> SeedRuns:
    return SeedRuns({run["seed"]: success(run, name).astype(float) for run in tasks_runs})


def _gained(tasks_runs: Sequence[Cell], name: str) -> tuple[int, int]:
    """Episodes in which the composition alone succeeded, and in which it failed although both parents succeeded."""
    gained = lost = 0
    for run in tasks_runs:
        first, second = (success(run, parent) for parent in run["parents"])
        composed = success(run, name)
        gained += int((composed & ~first & ~second).sum())
        lost += int((~composed & first & second).sum())
    return gained, lost


def _by_task(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["task"], []).append(cell)
    return groups


def _weights(tasks_runs: Sequence[Cell], name: str) -> str:
    if name not in SEARCHED:
        return "-"
    return " ".join(f"{run['weights'][name][0]:.1f}" for run in tasks_runs)


def _ratio(tasks_runs: Sequence[Cell], name: str) -> str:
    if name not in OPERATORS:
        return "-"
    return f"{median(run['latency']['ratio'][name] for run in tasks_runs):.2f}"


def _difference(verdict: TableVerdict | None) -> str:
    if verdict is None or verdict.comparison is None:
        return "-"
    gain = verdict.comparison.difference
    return f"{gain.estimate:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]"
