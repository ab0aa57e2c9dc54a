"""Metrics of one seed, and tables from cells: how well a learned world model values and orders policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.evaluation.ranking import mmrv, pairwise_accuracy, pearson, spearman, top1_regret

Cell = Mapping[str, Any]
Values = np.ndarray  # (P,) success rates of the policies of one task and seed
METRICS: dict[str, Callable[[Values, Values], float]] = {
    "pearson": lambda real, predicted: float(pearson(real, predicted)),
    "spearman": lambda real, predicted: float(spearman(real, predicted)),
    "mmrv": lambda real, predicted: float(mmrv(real, predicted)),
    "pairs": lambda real, predicted: float(pairwise_accuracy(real, predicted)),
    "regret": lambda real, predicted: float(top1_regret(real, predicted)),
    "bias": lambda real, predicted: float((predicted - real).mean()),
    "best policy": lambda real, predicted: float((predicted - real)[real.argmax()]),
}
"""Metrics of one seed; `best policy` is the bias of the policy with the largest real success."""

CORRELATIONS = ("pearson", "spearman")
SIGNED = (*CORRELATIONS, "bias", "best policy")  # from -1 to 1; others are from 0 to 1
REPLAYS = ("recorded", "detected", "replayed")  # shares of replayed episodes


def policy_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and policy: success rates over seeds, in the simulator and in the world model.

    `detected` applies the success head to recorded frames, `replayed` drives the world model by the recorded actions;
    both are shares of the first episodes, of which `recorded` succeeded.
    """
    table: list[dict[str, object]] = []
    for task, seeds in grouped(cells).items():
        for policy in dict.fromkeys(cell["policy"] for members in seeds.values() for cell in members):
            runs = [cell for members in seeds.values() for cell in members if cell["policy"] == policy]
            sides = {side: np.mean([success(cell, side) for cell in runs]) for side in ("real", "predicted")}
            found = {key: np.mean([run["replays"][key] for run in runs]) for key in REPLAYS}
            shown = {key: f"{value:.0%}" for key, value in (*sides.items(), *found.items())}
            table.append({"task": task, "policy": policy, "seeds": len(runs), **shown})
    return table


def success(cell: Cell, side: str) -> float:
    """Success rate of a policy in the simulator ("real") or in the world model ("predicted")."""
    return float(cell[side]["summary"]["success"])


def gap(seeds: Mapping[int, Sequence[Cell]]) -> str:
    """Loss of PSNR one frame ahead by shuffled actions, mean over seeds."""
    psnr = [members[0]["gate"]["psnr"] for members in seeds.values()]
    return f"{np.mean([each['true']['1'] - each['shuffled']['1'] for each in psnr]):.1f} dB"


def seconds_per_episode(members: Sequence[Cell]) -> str:
    """Wall seconds of an episode in the simulator and in the world model."""
    mean = {
        kind: np.mean([c[kind]["cost"]["wall_s"] / len(c[kind]["episodes"]["seed"]) for c in members])
        for kind in ("real", "predicted")
    }
    return f"{mean['real']:.2g} / {mean['predicted']:.2g}"


def grouped(cells: Sequence[Cell]) -> dict[str, dict[int, list[Cell]]]:
    """Cells by task and seed."""
    grouped: dict[str, dict[int, list[Cell]]] = {}
    for cell in cells:
        grouped.setdefault(cell["task"], {}).setdefault(cell["seed"], []).append(cell)
    return grouped
