"""Table from cells: how well the world model and FQE rank the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from robopolicy.evaluation.ranking import Ranking, mmrv, pearson, rank, spearman
from robopolicy.evaluation.result import EvalResult

Cell = dict[str, Any]
SHOWN = ("pearson", "spearman", "mmrv", "pairwise", "bias", "kappa")


def rankings(cells: Sequence[Cell]) -> dict[tuple[str, int], Ranking]:
    """Ranking of every task and seed."""
    return {
        group: rank(*({c["player"]: EvalResult.from_dict(c[kind]) for c in members} for kind in ("real", "predicted")))
        for group, members in _grouped(cells).items()
    }


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task, seed and estimator."""
    table: list[dict[str, object]] = []
    for (task, seed), ranking in rankings(cells).items():
        members = _grouped(cells)[task, seed]
        first = {"task": task, "seed": seed, "policies": len(members)}
        found = {key: f"{ranking.metrics[key]}" if key in ranking.metrics else "-" for key in SHOWN}
        gate = members[0]["gate"]["psnr"]
        gap = f"{gate['true']['1'] - gate['shuffled']['1']:.1f} dB"
        table.append({**first, "estimator": "world model", **found, "gap": gap, "s/episode": _seconds(members)})
        values = _fqe(members)
        if values is not None:
            found = {"pearson": f"{values[0]:.2f}", "spearman": f"{values[1]:.2f}", "mmrv": f"{values[2]:.2f}"}
            shown = {key: found.get(key, "-") for key in (*SHOWN, "gap", "s/episode")}
            table.append({**first, "estimator": "FQE", **shown})
    return table


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task and seed."""
    result: dict[str, Any] = {}
    for (task, seed), ranking in rankings(cells).items():
        members = _grouped(cells)[task, seed]
        values = _fqe(members)
        fqe = None if values is None else dict(zip(("pearson", "spearman", "mmrv"), values, strict=True))
        gate = {key: members[0]["gate"][key] for key in ("passed", "psnr", "directions")}
        own = {"fqe": fqe, "gate": gate, "horizons": by_horizon(members)}
        result.setdefault(task, {})[str(seed)] = {**ranking.to_dict(), **own}
    return {"tasks": result}


def by_horizon(members: Sequence[Cell]) -> dict[str, dict[str, float | None]]:
    """Pearson and bias of success within a quarter, half and all of the longest episode, if success ends it."""
    both = [[EvalResult.from_dict(cell[kind]) for cell in members] for kind in ("real", "predicted")]
    longest = max(int(result.lengths.max()) for side in both for result in side)
    found: dict[str, dict[str, float | None]] = {}
    for steps in (longest // 4, longest // 2, longest):
        real, predicted = (
            np.array([float((result.outcomes * (result.lengths <= steps)).mean()) for result in side]) for side in both
        )
        order = float(pearson(real, predicted))
        found[str(steps)] = {
            "pearson": order if np.isfinite(order) else None,
            "bias": float((predicted - real).mean()),
        }
    return found


def _fqe(members: Sequence[Cell]) -> tuple[float, float, float] | None:
    """Pearson, Spearman and MMRV of FQE; its values are discounted returns, so MMRV uses only their order."""
    if any(cell["fqe"] is None for cell in members):
        return None
    real = np.array([cell["real"]["summary"]["success"] for cell in members])
    value = np.array([cell["fqe"] for cell in members])
    return float(pearson(real, value)), float(spearman(real, value)), float(mmrv(real, value))


def _seconds(members: Sequence[Cell]) -> str:
    """Wall seconds of an episode in the simulator and in the world model."""
    mean = {
        kind: np.mean([c[kind]["cost"]["wall_s"] / len(c[kind]["episodes"]["seed"]) for c in members])
        for kind in ("real", "predicted")
    }
    return f"{mean['real']:.2g} / {mean['predicted']:.2g}"


def _grouped(cells: Sequence[Cell]) -> dict[tuple[str, int], list[Cell]]:
    grouped: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell["task"], cell["seed"]), []).append(cell)
    return grouped
