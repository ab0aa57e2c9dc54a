"""All fine-tuners from the same pretrained checkpoints, at equal environment steps: one table.

    python -m benchmarks.finetune --quick                      # lift, two methods, one seed, few steps, nothing written
    python -m benchmarks.finetune                              # everything missing; about 4 CPU minutes a cell
    python -m benchmarks.finetune --tasks lift --methods reinflow dsrl_na --seeds 0 1 2 --jobs 2
    python -m benchmarks.finetune --table                      # only rewrite the table from the finished cells

A cell is one method on one task with one seed: demonstrations, cloned base, fine-tuning, and 200 held-out episodes of
the base and of the last (not the best) checkpoint. Finished cells are skipped, so the table grows over many runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.common import load_cell, print_result, save_cell, write_result
from benchmarks.finetune.cell import base_policy, demonstrations, run_cell
from benchmarks.finetune.methods import METHODS
from benchmarks.finetune.table import figures, rows
from benchmarks.finetune.tasks import TASKS

Key = tuple[str, str, int]  # method, task, seed


def prepare(method: str, task: str, seed: int) -> None:
    """Collect the demonstrations and clone the base of a cell."""
    torch.set_num_threads(1)
    data = demonstrations(TASKS[task], seed)
    if (base := METHODS[method].base) is not None:
        base_policy(base, TASKS[task], seed, data)


def run(method: str, task: str, seed: int, steps: int | None) -> dict[str, Any]:
    """One cell."""
    torch.set_num_threads(1)
    return run_cell(METHODS[method], TASKS[task], seed, steps=steps)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"finetune/{key[0]}-{key[1]}-{key[2]}"


def run_all(keys: Sequence[Key], *, jobs: int, steps: int | None, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells in `jobs` processes: first what they share, one after the other, then the cells."""
    cells = {key: load_cell(cell_name(key)) for key in keys} if keep else dict.fromkeys(keys)
    missing = [key for key, cell in cells.items() if cell is None]
    shared = {(key[1], key[2], METHODS[key[0]].base): key for key in missing}
    for key in shared.values():
        prepare(*key)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, *key, steps): key for key in missing}
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
    key = "return_mean" if cell["finetuned"]["success"] is None else "success"
    before = "none" if cell["base"] is None else f"{cell['base'][key]:.3g}"
    return f"{before} -> {cell['finetuned'][key]:.3g} in {cell['seconds']:.0f} s"


def main() -> None:
    """Run what is missing, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two methods, one seed, few steps, nothing written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time, one thread each")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([("reinflow", "lift", 0), ("dsrl_na", "lift", 0)], jobs=2, steps=10_000, keep=False)
    elif arguments.table:
        keys = [(m, t, s) for t in TASKS for m in METHODS for s in range(100)]
        cells = [cell for cell in map(load_cell, map(cell_name, keys)) if cell is not None]
    else:
        keys = [(m, t, s) for t in arguments.tasks for s in arguments.seeds for m in arguments.methods]
        cells = run_all(keys, jobs=arguments.jobs, steps=None, keep=True)
    print_result("finetune", rows(cells), figures(cells))
    if not arguments.quick:
        write_result("finetune", rows(cells), figures(cells), command="python -m benchmarks.finetune")


if __name__ == "__main__":
    main()
