"""Compositions of two parents against each of them, with weights searched on other episodes: tables and a plot.

    python -m benchmarks.composition --quick                   # lift, one seed, little of everything, nothing written
    python -m benchmarks.composition                           # everything missing; about 6 CPU minutes a cell
    python -m benchmarks.composition --tasks lift push_t --seeds 0 1 2 --jobs 2
    python -m benchmarks.composition --table                   # only rewrite the tables from the finished cells

A cell is one task with one seed. Its two parents differ in head or in what they see, and each had its own half of the
demonstrations. The weights of the convex and of the OR composition are searched on a grid, all on the same 50 episodes;
then the parents and all compositions play 200 episodes that neither training nor search has seen. Seeds are pooled
(Wilson, 95 %), differences are paired by episode (Newcombe; McNemar's exact test). Finished cells are skipped, so the
tables grow over many runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.common import RESULTS, load_cell, print_result, save_cell, write_result
from benchmarks.composition.cell import OPERATORS, Settings, run_cell
from benchmarks.composition.table import curve_rows, figures, plot, rows
from benchmarks.composition.tasks import TASKS

Key = tuple[str, int]  # task, seed
QUICK = Settings(search_episodes=10, divisions=4, episodes=40, training=0.3, rounds=5)


def run(task: str, seed: int, settings: Settings) -> dict[str, Any]:
    """One cell."""
    torch.set_num_threads(1)
    return run_cell(TASKS[task], seed, settings)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"composition/pair-{key[0]}-{key[1]}"


def run_all(keys: Sequence[Key], *, jobs: int, settings: Settings, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells in `jobs` processes."""
    cells = {key: load_cell(cell_name(key)) for key in keys} if keep else dict.fromkeys(keys)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, *key, settings): key for key, cell in cells.items() if cell is None}
        for future in as_completed(running):
            key = running[future]
            if (error := future.exception()) is not None:
                print(f"{cell_name(key)}: FAILED: {error}", file=sys.stderr, flush=True)
                continue
            cells[key] = cell = future.result()
            print(f"{cell_name(key)}: {_progress(cell)}", flush=True)
            if keep:
                save_cell(cell_name(key), cell)
    return [cell for cell in cells.values() if cell is not None]


def _progress(cell: dict[str, Any]) -> str:
    def success(name: str) -> str:
        outcomes = cell["held_out"][name]["success"]
        return f"{sum(outcomes) / len(outcomes):.0%}"

    parents = " and ".join(success(name) for name in cell["parents"])
    composed = ", ".join(f"{name} {success(name)}" for name in OPERATORS)
    return f"{parents} -> {composed} in {cell['seconds']:.0f} s"


def main() -> None:
    """Run what is missing, then print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, little of everything, nothing written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time, one thread each")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([("lift", 0)], jobs=1, settings=QUICK, keep=False)
    elif arguments.table:
        keys = [(task, seed) for task in TASKS for seed in range(100)]
        cells = [cell for cell in map(load_cell, map(cell_name, keys)) if cell is not None]
    else:
        keys = [(task, seed) for seed in arguments.seeds for task in arguments.tasks]
        cells = run_all(keys, jobs=arguments.jobs, settings=Settings(), keep=True)
        cells.sort(key=lambda cell: (list(TASKS).index(cell["task"]), cell["seed"]))
    if not arguments.quick and cells:
        command = "python -m benchmarks.composition"
        write_result("composition", rows(cells), figures(cells), command=command)
        write_result("composition_curve", curve_rows(cells), {"figure": "composition_curve.png"}, command=command)
        plot(cells, RESULTS / "composition_curve.png")
    print_result("composition", rows(cells), figures(cells))


if __name__ == "__main__":
    main()
