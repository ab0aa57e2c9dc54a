"""What processes run for the table, which import this module; `__main__` they could not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.finetune.cell import base_policy, demonstrations, run_cell
from benchmarks.finetune.methods import METHODS
from benchmarks.finetune.tasks import TASKS
from benchmarks.parallel import run_cells

Key = tuple[str, str, int]  # method, task, seed


def run_all(keys: Sequence[Key], *, jobs: int, steps: int | None, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells: first what they share, one after the other, then the cells."""
    run = partial(_run, steps=steps)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=keep, prepare=_prepare)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"finetune/{key[0]}-{key[1]}-{key[2]}"


def _run(key: Key, steps: int | None) -> dict[str, Any]:
    method, task, seed = key
    return run_cell(METHODS[method], TASKS[task], seed, steps=steps)


def _prepare(keys: Sequence[Key]) -> None:
    """Collect the demonstrations and clone the bases."""
    torch.set_num_threads(1)
    for task, seed, base in dict.fromkeys((key[1], key[2], METHODS[key[0]].base) for key in keys):
        data = demonstrations(TASKS[task], seed)
        if base is not None:
            base_policy(base, TASKS[task], seed, data)


def _progress(cell: dict[str, Any]) -> str:
    key = "return_mean" if cell["finetuned"]["success"] is None else "success"
    before = "none" if cell["base"] is None else f"{cell['base'][key]:.3g}"
    return f"{before} -> {cell['finetuned'][key]:.3g} in {cell['seconds']:.0f} s"
