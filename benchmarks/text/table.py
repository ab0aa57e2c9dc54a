"""Table from cells: held-out accuracy with its interval over seeds, and a verdict on every recipe.

A recipe is compared with its baseline over common seeds, from the same imitated policies. Holm's correction covers all
comparisons of the table. A recipe whose mechanism did not act in most of its cells gets no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.text.cell import SAMPLES
from benchmarks.text.recipes import BASELINE, NULL, RECIPES, arms
from benchmarks.text.tasks import TASKS
from robopolicy.evaluation.comparison import NullRate, SeedRuns, TableVerdict, judge, null_rate, seed_interval
from robopolicy.evaluation.intervals import Interval

Cell = dict[str, Any]
Key = tuple[str, str]  # task, arm
BASE = "(imitation)"
AFTER_NULL = 1000  # added to the seeds of the null arm where they join the baseline's
SHOWN = ("entropy", "length")  # of sampled held-out answers
TRAINING = {"dead groups": "degenerate", "clipped": "clip_fraction"}


def runs(cells: Sequence[Cell], task: str, arm: str, *, stage: str = "after") -> SeedRuns:
    """Success rates of held-out problems by seed, and the reason why the mechanism of the arm did not act."""
    own = [cell for cell in cells if (cell["task"], cell["recipe"]) == (task, arm)]
    outcomes = {cell["seed"]: np.array(cell[stage]["wins"]) / SAMPLES for cell in own}
    reasons = [reason for cell in own if (reason := cell["mechanism"]["reason"])]
    inactive = arm in RECIPES and 2 * len(reasons) > len(own)
    return SeedRuns(outcomes, reason=reasons[0] if inactive else "")


def verdicts(cells: Sequence[Cell]) -> dict[Key, TableVerdict]:
    """Verdict on every recipe with cells, and on the null arm of every task."""
    pairs = {
        (task, arm): (runs(cells, task, arm), runs(cells, task, _against(arm)))
        for task in TASKS
        for arm in arms(task)
        if arm in RECIPES or arm == NULL
    }
    return judge({key: pair for key, pair in pairs.items() if pair[0].outcomes and pair[1].outcomes})


def null_arm(cells: Sequence[Cell], found: dict[Key, TableVerdict]) -> NullRate | None:
    """False positives of the table, from random splits of the runs of the baseline and of the null arm."""
    compared = [task for (task, arm), verdict in found.items() if arm != NULL and verdict.comparison is not None]
    merged = {
        task: SeedRuns(
            {
                seed + offset: values
                for arm, offset in ((BASELINE, 0), (NULL, AFTER_NULL))
                for seed, values in runs(cells, task, arm).outcomes.items()
            }
        )
        for task in dict.fromkeys(compared)
    }
    return null_rate(merged, {task: compared.count(task) for task in merged})


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and arm, the imitated policy first."""
    found, table = verdicts(cells), list[dict[str, object]]()
    for task in dict.fromkeys(cell["task"] for cell in cells):
        started = [cell for cell in cells if (cell["task"], cell["recipe"]) == (task, BASELINE)]
        if started:
            table.append(_row(task, BASE, started, None, stage="base"))
        for arm in arms(task):
            own = [cell for cell in cells if (cell["task"], cell["recipe"]) == (task, arm)]
            if own:
                table.append(_row(task, arm, own, found.get((task, arm))))
    return table


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task and arm, with the curves."""
    found = verdicts(cells)
    rate = null_arm(cells, found)
    result: dict[str, Any] = {
        "seeds": sorted({cell["seed"] for cell in cells}),
        "null_arm": None if rate is None else rate.to_dict(),
    }
    for task in dict.fromkeys(cell["task"] for cell in cells):
        of_task = partial(_figures, cells, task)
        entries = {BASE: of_task(BASELINE, stage="base")} | {arm: of_task(arm) for arm in arms(task)}
        for arm, verdict in ((arm, verdict) for (name, arm), verdict in found.items() if name == task):
            entries[arm] |= {"against": _against(arm), "verdict": verdict.to_dict()}
        result[task] = {arm: entry for arm, entry in entries.items() if entry}
    return result


def notes(cells: Sequence[Cell]) -> list[str]:
    """Lines below the table: the null arm, and why recipes have no verdict."""
    found = verdicts(cells)
    rate = null_arm(cells, found)
    lines = [str(rate) if rate is not None else "The null arm needs ten runs of the baseline on every task."]
    reasons = [(arm, task, verdict) for (task, arm), verdict in found.items() if verdict.reason]
    return lines + [f"- `{arm}` on {task}: {verdict.verdict}, {verdict.reason}." for arm, task, verdict in reasons]


def _against(arm: str) -> str:
    return RECIPES[arm].against if arm in RECIPES else BASELINE


def _row(
    task: str, arm: str, own: Sequence[Cell], verdict: TableVerdict | None, *, stage: str = "after"
) -> dict[str, object]:
    trained = stage == "after"
    comparison = None if verdict is None else verdict.comparison
    return {
        "task": task,
        "recipe": arm,
        "seeds": len(own),
        "accuracy": f"{_accuracy(own, task, arm if trained else BASELINE, stage):.1%}",
        "greedy": f"{fmean(fmean(cell[stage]['greedy']) for cell in own):.1%}",
        **{name: f"{fmean(cell[stage][name] for cell in own):.3f}" for name in SHOWN},
        **{name: _mean(own, key) if trained else "-" for name, key in TRAINING.items()},
        "mechanism acts": f"{fmean(c['mechanism']['share'] for c in own):.0%}" if trained and arm in RECIPES else "-",
        "CPU s": round(fmean(cell["cpu_seconds"] for cell in own)) if trained else "-",
        "against": _against(arm) if verdict is not None else "-",
        "difference": "-" if comparison is None else f"{comparison.difference:+.1%}",
        "p (Holm)": "-" if verdict is None or verdict.p_adjusted is None else f"{verdict.p_adjusted:.3f}",
        "verdict": "-" if verdict is None else verdict.verdict,
    }


def _figures(cells: Sequence[Cell], task: str, arm: str, *, stage: str = "after") -> dict[str, Any]:
    own = [cell for cell in cells if (cell["task"], cell["recipe"]) == (task, arm)]
    if not own:
        return {}
    accuracy = _accuracy(own, task, arm, stage)
    found = {
        "accuracy": {"value": accuracy.estimate, "low": accuracy.low, "high": accuracy.high},
        "by_seed": {str(cell["seed"]): fmean(cell[stage]["wins"]) / SAMPLES for cell in own},
        **{name: fmean(cell[stage][name] for cell in own) for name in SHOWN},
    }
    if stage == "base":
        return found
    curves = np.array([cell["curve"] for cell in own])  # (seeds, points, 2)
    return found | {
        "tokens": fmean(cell["tokens"] for cell in own),
        "mechanism": fmean(cell["mechanism"]["share"] for cell in own),
        "curve": curves.mean(0).tolist(),
    }


def _accuracy(own: Sequence[Cell], task: str, arm: str, stage: str) -> Interval:
    return seed_interval(runs(own, task, arm, stage=stage).outcomes)


def _mean(own: Sequence[Cell], name: str) -> str:
    found = [cell["training"][name] for cell in own if name in cell["training"]]
    return f"{fmean(found):.3f}" if found else "-"
