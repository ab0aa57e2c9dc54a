"""Cell functions that worker processes import; they cannot import `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.parallel import run_cells
from benchmarks.text.cell import ACCOMPANIED, TASKS, imitated, run_cell

Key = tuple[str, str, int]  # recipe, task, seed


def run_all(keys: Sequence[Key], *, jobs: int, tokens: int | None, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells: first their shared checkpoints, then the cells."""
    run = partial(_run, tokens=tokens)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=keep, prepare=_prepare)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"text/{key[0]}-{key[1]}-{key[2]}"


def _run(key: Key, tokens: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe, task, seed = key
    return run_cell(recipe, TASKS[task], seed, tokens=tokens)


def _prepare(keys: Sequence[Key]) -> None:
    torch.set_num_threads(1)
    for name in dict.fromkeys(key[1] for key in keys):
        imitated(TASKS[name], TASKS[name].imitation)
    for name in dict.fromkeys(key[1] for key in keys if key[0] in ACCOMPANIED):
        imitated(TASKS[name], TASKS[name].taught)


def _progress(cell: dict[str, Any]) -> str:
    if cell["refused"]:
        return f"refused: {cell['refused']}"
    before, after = (cell[stage]["correct"] / cell[stage]["n"] for stage in ("base", "after"))
    return f"{before:.0%} -> {after:.0%} in {cell['cpu_seconds']:.0f} CPU s"
