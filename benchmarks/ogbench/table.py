"""Table from cells: success per method and domain, with the published success of the same tasks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.ogbench.methods import METHODS, protocols, published
from robopolicy.evaluation.comparison import seed_interval

Cell = dict[str, Any]
BUDGETS = (100_000, 200_000)  # updates
MARGIN = 10.0  # points that a success rate may be below the published interval


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The numbers of the table by method, domain and number of updates, for programs."""
    found: dict[str, Any] = {}
    for method in METHODS.values():
        for domain in sorted({cell["domain"] for cell in cells if cell["method"] == method.name}):
            for updates in BUDGETS:
                own = [cell for cell in cells if (cell["method"], cell["domain"]) == (method.name, domain)]
                if runs := _by_task(own, updates):
                    entry = _entry(method.name, domain, updates, runs)
                    found.setdefault(method.name, {}).setdefault(domain, {})[str(updates)] = entry
    return found


def _by_task(cells: Sequence[Cell], updates: int) -> dict[int, dict[int, float]]:
    """Success [%] after `updates` by task and seed; longer runs count as well."""
    runs: dict[int, dict[int, float]] = {}
    for cell in sorted(cells, key=lambda cell: cell["updates"]):
        if (rate := cell["success"].get(str(updates))) is not None:
            runs.setdefault(cell["task"], {})[cell["seed"]] = 100 * rate
    return dict(sorted(runs.items()))


def _entry(name: str, domain: str, updates: int, runs: dict[int, dict[int, float]]) -> dict[str, Any]:
    """Mean over the tasks with runs and over the seeds that all of them have, and the published mean of these tasks."""
    seeds = sorted(set.intersection(*(set(part) for part in runs.values())))
    means = {seed: fmean(part[seed] for part in runs.values()) for seed in seeds}
    known = [published(METHODS[name], domain, task, updates) for task in runs]
    curves = [value for value in known if value is not None]
    entry: dict[str, Any] = {
        "tasks": list(runs),
        "seeds": seeds,
        "success": {str(task): part for task, part in runs.items()},
        "mean": seed_interval(means).to_dict() if seeds else None,
        "published": None,
    }
    if seeds and len(curves) == len(runs):
        mean, low, high = (fmean(value[i] for value in curves) for i in range(3))
        entry["published"] = {"value": mean, "low": low, "high": high}
        entry["met"] = fmean(means.values()) >= low - MARGIN
    return entry


def rows(found: dict[str, Any]) -> list[dict[str, object]]:
    """One row per entry of `figures`."""
    return [
        {
            "method": name,
            "protocol": protocols()[METHODS[name].protocol]["source"],
            "domain": domain,
            "updates": int(updates),
            "tasks": " ".join(map(str, entry["tasks"])),
            "seeds": len(entry["seeds"]),
            "success [95 %]": _text(entry["mean"], "estimate"),
            "published [95 %]": _text(entry["published"], "value"),
            "met": "-" if entry["published"] is None else "yes" if entry["met"] else "no",
            "by task, ours / published": "; ".join(
                _task(name, domain, updates, *part) for part in entry["success"].items()
            ),
        }
        for name, domains in found.items()
        for domain, budgets in domains.items()
        for updates, entry in budgets.items()
    ]


def _task(name: str, domain: str, updates: str, task: str, runs: dict[int, float]) -> str:
    known = published(METHODS[name], domain, int(task), int(updates))
    return f"{fmean(runs.values()):.0f} / {'-' if known is None else f'{known[0]:.0f}'}"


def _text(interval: dict[str, Any] | None, key: str) -> str:
    if interval is None:
        return "-"
    bounds = [interval["low"], interval["high"]]
    known = all(bound is not None and bound == bound for bound in bounds)
    return f"{interval[key]:.0f}" + (f" [{bounds[0]:.0f}, {bounds[1]:.0f}]" if known else "")
