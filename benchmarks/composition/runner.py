"""Which cells are missing, and running them in processes (which import this module: `__main__` they could not)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.common import load_cell, save_cell
from benchmarks.composition.cell import OPERATORS, Settings, run_cell
from benchmarks.composition.tasks import TASKS

Key = tuple[str, int]  # task, seed


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
    missing = [key for key, cell in cells.items() if cell is None]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, *key, settings): key for key in missing}
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
