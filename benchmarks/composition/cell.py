"""One cell: demonstrations -> two parents -> searched weights -> evaluation of all on the same held-out seeds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import outcomes
from benchmarks.composition.diagnosis import disagreement
from benchmarks.composition.parents import demonstrations, train_parent
from benchmarks.composition.tasks import PairTask
from robopolicy.evaluation.search.weights import SearchLog, SimEvaluator, evaluate_held_out, make_search, search_weights
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.composition.operators import And, Convex, Operator, Or
from robopolicy.policies.wrappers.composed import compose
from robopolicy.sim.registry import make_sim

OPERATORS: dict[str, Operator] = {
    "convex": Convex(),
    "or": Or(sampler="ode"),
    "or, sde": Or(sampler="sde"),
    "and": And(sampler="ode"),
    "and, sde": And(sampler="sde"),
}
SEARCHED = ("convex", "or", "or, sde")  # operators with searched weights; AND weights follow from the densities
SEARCH, HELD_OUT = 20_000, 50_000  # first episode seeds; a cell adds 1000 * seed
ENVS = 32
PARENTS = ("first parent", "second parent")
ITSELF = "first with itself"  # control: the first parent, composed with the same one of another training seed
AGAIN = 50  # added to the seed of that training


@dataclass(frozen=True)
class Settings:
    """Budget of a cell."""

    search_episodes: int = 50  # per weight
    divisions: int = 5  # weights are multiples of 1 / divisions
    episodes: int = 200  # held out
    updates: int = 0  # of the parents; 0: the task's number
    rounds: int = 30  # of the timing


def run_cell(task: PairTask, seed: int, settings: Settings, folder: Path, *, composed: bool = True) -> dict[str, Any]:
    """Parents of one task with one seed, and with `composed` their compositions; finished parts in `folder` are reused.

    `searched` has the success of both parents on the episodes of the search, `held_out` outcomes of other episodes.
    """
    start, shift = time.process_time(), 1000 * seed
    task = _shortened(task, settings.updates)
    folder = folder / _digest(task, settings)
    folder.mkdir(parents=True, exist_ok=True)
    data = demonstrations(task, seed, folder / "demonstrations")
    cell: dict[str, Any] = {"task": task.name, "seed": seed}
    with closing(make_sim(task.task, task.options(ENVS))) as sim:
        parents = [train_parent(task, side, data, sim.spec, seed, folder / f"parent-{side}") for side in (0, 1)]
        policies: dict[str, Policy] = dict(zip(PARENTS, parents, strict=True))
        evaluator = SimEvaluator(sim)
        episodes = range(SEARCH + shift, SEARCH + shift + settings.search_episodes)
        cell["searched"] = [float(np.mean(outcomes(evaluator(parent, episodes)))) for parent in parents]
        if composed:
            again = train_parent(task, 0, data, sim.spec, seed + AGAIN, folder / "again")
            found, cell["weights"], cell["curves"] = _search(parents, evaluator, settings, SEARCH + shift, folder)
            policies |= {ITSELF: compose([parents[0], again])} | found
            obs = {key: value.unsqueeze(1) for key, value in sim.reset(SEARCH).items()}
            cell["disagreement"] = disagreement(parents, obs)
            # Timed with fixed weights in the middle: chosen weights may select a single parent.
            timed = dict(zip(PARENTS, parents, strict=True))
            timed |= {name: compose(parents, operator) for name, operator in OPERATORS.items()}
            cell["latency"] = latency(timed, PARENTS, obs, settings.rounds)
        seeds = range(HELD_OUT + shift, HELD_OUT + shift + settings.episodes)
        results = evaluate_held_out(policies, evaluator, seeds, log=_ledger(folder / "held_out.jsonl"))
    cell["held_out"] = {name: outcomes(result) for name, result in results.items()}
    return {**cell, "seconds": round(time.process_time() - start, 1)}


def _search(
    parents: list[Policy], evaluator: SimEvaluator, settings: Settings, seed: int, folder: Path
) -> tuple[dict[str, Policy], dict[str, list[float]], dict[str, list[tuple[float, list[int]]]]]:
    """Compositions by operator, chosen weights, and success by weight of the first parent."""
    policies: dict[str, Policy] = {}
    weights: dict[str, list[float]] = {}
    curves: dict[str, list[tuple[float, list[int]]]] = {}
    for name, operator in OPERATORS.items():
        composed = compose(parents, operator)
        policies[name] = composed
        if name in SEARCHED:
            method = make_search("grid", episodes=settings.search_episodes, divisions=settings.divisions)
            ledger = _ledger(folder / f"{name.replace(', ', '_')}.jsonl")
            found = search_weights(method, list(PARENTS), composed.with_weights, evaluator, seed=seed, log=ledger)
            policies[name], weights[name] = composed.with_weights(found.weights), list(found.weights)
            curves[name] = [(c.weights[0], outcomes(c.result)) for c in found.candidates]
    return policies, weights, curves


def latency(policies: Mapping[str, Policy], parents: Sequence[str], obs: Observation, rounds: int) -> dict[str, Any]:
    """Milliseconds of one batched decision of every policy, and the ratios of compositions to the sum of their parents.

    Policies take turns. Each ratio is the median over rounds of the composition's time divided by its parents' sum.
    """
    times: dict[str, list[float]] = {name: [] for name in policies}
    batch = len(next(iter(obs.values())))
    for turn in range(-2, rounds):  # two to warm up
        for name, policy in policies.items():
            seen = {key: obs[key] for key in policy.spec.observation}
            with torch.inference_mode(), evaluation_mode(policy):
                begin = time.perf_counter()
                policy.act(seen, deterministic=True, generator=torch.Generator().manual_seed(turn + 2))
                spent = time.perf_counter() - begin
            if turn >= 0:
                times[name].append(1e3 * spent)
    total = np.sum([times[name] for name in parents], axis=0)
    return {
        "batch": batch,
        "ms": {name: round(median(spent), 3) for name, spent in times.items()},
        "ratio": {name: float(np.median(times[name] / total)) for name in policies if name not in parents},
    }


def _shortened(task: PairTask, updates: int) -> PairTask:
    if not updates:
        return task
    first, second = (replace(parent, updates=updates) for parent in task.parents)
    return replace(task, first=first, second=second)


def _digest(task: PairTask, settings: Settings) -> str:
    """Hash of the settings of a cell, so that intermediate results of other settings are not reused."""
    return hashlib.sha256(repr((task, settings)).encode()).hexdigest()[:8]


def _ledger(path: Path) -> SearchLog:
    return SearchLog.open(path) if path.exists() else SearchLog(path)
