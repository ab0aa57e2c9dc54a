"""Training with `sim.overlap=1` against alternating simulation and learning: wall time per update, and returns.

    python -m benchmarks.overlap --quick      # few turns of PPO, nothing written
    python -m benchmarks.overlap --returns    # train the missing seeds, 1 CPU hour; also on a busy machine
    python -m benchmarks.overlap              # measure the times on an idle machine, 5 minutes, and write the table

Both runs of a case have the same settings and take equal numbers of control steps per update. They take turns in one
process, so that a drift of the machine's speed affects both. A ratio is the overlapped time divided by the alternating
one, paired by turn; the ratio of CPU times is the cost of overlap. Learning has one torch thread, and the critic of PPO
a second one; physics has one thread per core. Returns are means over the training episodes that ended in the last fifth
of the updates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from benchmarks.common import made_by_text, print_result, write_result
from benchmarks.parallel import run_cells
from benchmarks.sac_vs_sb3 import ratio
from robopolicy.evaluation.intervals import student_mean
from robopolicy.training.build import RunComponents, build, resolve_config
from robopolicy.training.compose import compose_config

Key = tuple[str, int, int]  # case, overlap, seed
NOTES = [
    "Ratios are time with overlap / time without, with 95 % bootstrap intervals over the turns of one run; runs differ "
    "by more where threads compete for cores, as with PPO.",
    "The change of the return is the mean of the differences paired by seed, with Student's 95 % interval over seeds.",
]


@dataclass(frozen=True)
class Case:
    """One learner on half_cheetah."""

    text: str
    settings: tuple[str, ...]
    updates: int  # of one turn
    steps: int = 0  # control steps of the runs whose returns are compared; 0: only timed


CHEETAH = ("experiment=from_scratch", "task=half_cheetah")
SAC = (*CHEETAH, "policy=squashed_gaussian", "algorithm=sac", "replay.learning_starts=1000")
CASES = {
    "ppo": Case("PPO, 16 environments", CHEETAH, 4, 100_000),
    "sac": Case("SAC, 4 environments, 4 gradient steps", SAC, 40, 21_000),
    "sac_64": Case("SAC, 64 environments, 4 gradient steps", (*SAC, "sim.num_envs=64", "algorithm.utd=0.0625"), 40),
    "sac_1024": Case(
        "SAC, 1024 environments, 4 gradient steps", (*SAC, "sim.num_envs=1024", f"algorithm.utd={4 / 1024}"), 40
    ),
}


def parts_of(case: Case, overlap: int, seed: int, budget: str) -> RunComponents:
    """Learner and simulator of one run."""
    common = (budget, f"sim.overlap={overlap}", f"seed={seed}", "evaluation.episodes=0")
    return build(resolve_config(compose_config([*case.settings, *common])))


def train(parts: RunComponents, updates: int) -> dict[str, float]:
    """Seconds of a number of updates: wall, CPU, and in `next`."""
    simulating, start, cpu = 0.0, time.perf_counter(), time.process_time()
    for _ in range(updates):
        before = time.perf_counter()
        batch = parts.source.next(parts.algorithm)
        simulating += time.perf_counter() - before
        parts.algorithm.update(batch)
    wall = time.perf_counter() - start
    return {"wall": wall, "cpu": time.process_time() - cpu, "next": simulating}


def measure(case: Case, turns: int) -> dict[str, Any]:
    """Seconds per update of both modes in every turn, after two updates to warm up."""
    runs = [parts_of(case, overlap, 0, "budget.updates=1000000") for overlap in (0, 1)]
    for run in runs:
        train(run, 2)
    taken: list[list[dict[str, float]]] = [[], []]
    for turn in range(turns):
        for overlap in ((0, 1), (1, 0))[turn % 2]:
            taken[overlap].append(train(runs[overlap], case.updates))
    for run in runs:
        run.close()
    seconds = {key: [[found[key] / case.updates for found in mode] for mode in taken] for key in ("wall", "cpu")}
    return {
        "alternating_ms": 1e3 * median(seconds["wall"][0]),
        "overlap_ms": 1e3 * median(seconds["wall"][1]),
        "simulating": median(found["next"] / found["wall"] for found in taken[0]),
        "wall": ratio(seconds["wall"][1], seconds["wall"][0]),
        "cpu": ratio(seconds["cpu"][1], seconds["cpu"][0]),
    }


def final_return(key: Key) -> dict[str, Any]:
    """One cell: mean return of the last training episodes of a run."""
    name, overlap, seed = key
    parts = parts_of(CASES[name], overlap, seed, f"budget.env_steps={CASES[name].steps}")
    last = parts.total_updates // 5
    train(parts, parts.total_updates - last)
    parts.source.metrics()
    train(parts, last)
    value = parts.source.metrics()["rollout/return"]
    parts.close()
    return {"case": name, "overlap": overlap, "seed": seed, "return": value}


def rows(times: dict[str, dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """One row per case."""
    table: list[dict[str, object]] = []
    for name, found in times.items():
        alternating, overlapped = (
            {cell["seed"]: cell["return"] for cell in cells if (cell["case"], cell["overlap"]) == (name, overlap)}
            for overlap in (0, 1)
        )
        seeds = sorted(alternating.keys() & overlapped.keys())
        table.append(
            {
                "learner": CASES[name].text,
                "ms per update": round(found["alternating_ms"], 1),
                "with overlap": round(found["overlap_ms"], 1),
                "simulation": f"{found['simulating']:.0%}",
                "wall time": _interval(found["wall"]),
                "CPU time": _interval(found["cpu"]),
                "seeds": len(seeds),
                "return": f"{fmean(alternating[seed] for seed in seeds):.0f}" if seeds else "-",
                "change of the return": _change([alternating[seed] for seed in seeds], [overlapped[s] for s in seeds]),
            }
        )
    return table


def _interval(value: dict[str, float]) -> str:
    return f"{value['value']:.2f}x [{value['low']:.2f}, {value['high']:.2f}]"


def _change(alternating: list[float], overlapped: list[float]) -> str:
    """Mean difference of the returns, paired by seed, with Student's interval over the seeds."""
    if len(alternating) < 2:
        return "-"
    return f"{student_mean([new - old for old, new in zip(alternating, overlapped, strict=True)]):+.0f}"


def _name(key: Key) -> str:
    return f"overlap/{key[0]}-{'overlap' if key[1] else 'alternating'}-{key[2]}"


def main() -> None:
    """Measure the times, run every missing seed, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns of PPO, no results written")
    parser.add_argument("--returns", action="store_true", help="only train the missing seeds")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs for the returns")
    arguments = parser.parse_args()
    if arguments.quick:
        times = {"ppo": measure(CASES["ppo"], 3)}
        print_result("overlap", rows(times, []), {"times": times})
        return
    times = {} if arguments.returns else {name: measure(case, 20) for name, case in CASES.items()}
    learners = [name for name, case in CASES.items() if case.steps]
    keys = [(name, overlap, seed) for name in learners for seed in arguments.seeds for overlap in (0, 1)]
    progress = partial(str.format, "{0[return]:.0f}")
    cells = run_cells(keys, final_return, name=_name, progress=progress, jobs=arguments.jobs, keep=True)
    if not arguments.returns:
        figures = {"times": times, "cells": cells}
        print_result("overlap", rows(times, cells), figures)
        notes = [*NOTES, f"Returns are from cells that ran earlier. {made_by_text(cells)}"]
        write_result("overlap", rows(times, cells), figures, command="python -m benchmarks.overlap", notes=notes)


if __name__ == "__main__":
    main()
