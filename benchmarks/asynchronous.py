"""Asynchronous and synchronous rollouts of GRPO on additions, in a thread or in processes, at equal updates.

    python -m benchmarks.asynchronous --quick       # one seed, six updates, nothing written
    python -m benchmarks.asynchronous               # 3 seeds, about 2 CPU minutes a cell
    python -m benchmarks.asynchronous --updates 30 --seeds 1

All cells start from an imitated policy of `benchmarks.text` and make the same number of updates with recipe
`asyncflow`. They differ in where rollouts are generated (in this process in turns with learning, in a thread, in two
processes, or in two Ray actors on this machine, where Ray is installed) and in how many updates old the rollout weights
may be. Timing starts after the first update, when all rollout workers run. Cells run one at a time, because they are
timed; times are meaningful only on an idle machine. Finished cells are skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import print_result, write_result
from benchmarks.parallel import run_cells
from benchmarks.text.cell import HELD_OUT, examine
from benchmarks.text.tasks import TASKS, imitated
from robopolicy.evaluation.comparison import seed_interval
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.text_file_source import recipe_source

NAME = "arithmetic"
TASK = TASKS[NAME]
UPDATES, QUICK = 60, 6
Key = tuple[str, int]  # mode, seed


@dataclass(frozen=True)
class Mode:
    """Where rollouts are generated, and how old their weights may be."""

    text: str
    staleness: int
    players: int
    place: str = "process"


MODES = {
    "synchronous": Mode("in turns with learning", 0, 0),
    "thread-1": Mode("a thread, 1 update old", 1, 0),
    "processes-0": Mode("2 processes, up to date", 0, 2),
    "processes-1": Mode("2 processes, 1 update old", 1, 2),
    "processes-2": Mode("2 processes, 2 updates old", 2, 2),
    "ray-1": Mode("2 actors of Ray, 1 update old", 1, 2, "ray"),
}


def run(key: Key, updates: int) -> dict[str, Any]:
    """One cell: updates from the imitated checkpoint, their time, and accuracy before and after."""
    name, seed = key
    mode = MODES[name]
    torch.manual_seed(seed)
    policy = imitated(NAME, 0)
    base = examine(policy, NAME, HELD_OUT)
    config = TextRecipeConfig(
        recipe="asyncflow",
        lr=1e-3,
        prompts_per_update=32,
        minibatches=4,
        staleness=mode.staleness,
        num_workers=mode.players,
        worker_backend=mode.place,
    )
    algorithm = TextRecipe(config, policy, total_updates=updates)
    sim = make_sim(TASK.task, SimOptions(num_envs=1))
    assert isinstance(sim, TextSim)
    start, tokens, ages = 0.0, 0.0, []
    with closing(recipe_source(sim, algorithm, 1_000_000 * (1 + seed))) as source:  # type: ignore[type-var]
        for update in range(updates):
            batch = source.next(algorithm)
            if update == 1:
                start = time.monotonic()
            if update:
                tokens += float(batch.valid().sum())
            ages.append(float((algorithm.updates - batch.require("version")).double().mean()))
            algorithm.update(batch)
        seconds = time.monotonic() - start
    after = examine(policy, NAME, HELD_OUT)
    return {
        "mode": name,
        "seed": seed,
        "updates": updates,
        "seconds": round(seconds, 2),
        "tokens_per_second": tokens / seconds,
        "staleness": fmean(ages),
        "base": fmean(base["greedy"]),
        "after": after["greedy"],  # outcomes of held-out problems
    }


def rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """One row per mode."""
    table: list[dict[str, object]] = []
    for name, mode in MODES.items():
        found = [cell for cell in cells if cell["mode"] == name]
        if found:
            rate = fmean(cell["tokens_per_second"] for cell in found)
            after = seed_interval({cell["seed"]: cell["after"] for cell in found})
            table.append(
                {
                    "rollouts": mode.text,
                    "seeds": len(found),
                    "tokens/s": round(rate),
                    "against synchronous": _against(found, cells),
                    "mean age [updates]": round(fmean(cell["staleness"] for cell in found), 2),
                    "accuracy": f"{after:.1%}",
                }
            )
    return table


def _against(found: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> str:
    """Mean ratio of tokens per second to the synchronous mode, paired by seed."""
    plain = {cell["seed"]: cell["tokens_per_second"] for cell in cells if cell["mode"] == "synchronous"}
    ratios = [cell["tokens_per_second"] / plain[cell["seed"]] for cell in found if cell["seed"] in plain]
    return f"{fmean(ratios):.2f}x" if ratios else "-"


def _progress(cell: dict[str, Any]) -> str:
    return f"{cell['base']:.0%} -> {fmean(cell['after']):.0%}, {cell['tokens_per_second']:.0f} tokens/s"


def _name(key: Key) -> str:
    return f"asynchronous/{key[0]}-arithmetic-{key[1]}"


def _prepare(keys: Sequence[Key]) -> None:
    if keys:
        imitated(NAME, 0)


def main() -> None:
    """Run every missing cell, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, six updates, no results written")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of every cell")
    arguments = parser.parse_args()
    seeds, updates = ([0], QUICK) if arguments.quick else (arguments.seeds, arguments.updates)
    cells = run_cells(
        [(name, seed) for seed in seeds for name, mode in MODES.items() if mode.place != "ray" or find_spec("ray")],
        partial(run, updates=updates),
        name=_name,
        progress=_progress,
        jobs=1,
        keep=not arguments.quick,
        prepare=_prepare,
    )
    figures = {"task": TASK.task, "updates": updates, "cells": cells}
    print_result("asynchronous", rows(cells), figures, cells=cells)
    if not arguments.quick:
        write_result("asynchronous", rows(cells), figures, command="python -m benchmarks.asynchronous", cells=cells)


if __name__ == "__main__":
    main()
