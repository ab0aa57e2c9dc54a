"""Cell functions that worker processes import; they cannot import `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch

from benchmarks.parallel import run_cells
from benchmarks.text.cell import SAMPLES, run_cell
from benchmarks.text.recipes import BASELINE, NULL, arms

Key = tuple[str, str, int]  # arm, task, seed


def cell_keys(tasks: Sequence[str], seeds: Sequence[int], only: Sequence[str] = ()) -> list[Key]:
    """Keys of all cells, the baseline and the null arm first, then seed by seed; `only` selects arms."""
    found = [(arm, task, seed) for seed in seeds for task in tasks for arm in arms(task) if not only or arm in only]
    return sorted(found, key=lambda key: key[0] not in (BASELINE, NULL))


def run_all(keys: Sequence[Key], *, jobs: int, tokens: int | None, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells."""
    run = partial(_run, tokens=tokens)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=keep)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"text/{key[0]}-{key[1]}-{key[2]}"


def _run(key: Key, tokens: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    arm, task, seed = key
    return run_cell(arm, task, seed, tokens=tokens)


def _progress(cell: dict[str, Any]) -> str:
    before, after = (fmean(cell[stage]["wins"]) / SAMPLES for stage in ("base", "after"))
    return f"{before:.0%} -> {after:.0%} in {cell['cpu_seconds']:.0f} CPU s"
