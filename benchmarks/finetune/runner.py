"""Which cells are missing, and running them in processes (which import this module: `__main__` they could not)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.common import load_cell, save_cell
from benchmarks.finetune.cell import base_policy, demonstrations, run_cell
from benchmarks.finetune.methods import METHODS
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
