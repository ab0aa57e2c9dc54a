"""Cell functions that worker processes import; they cannot import `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.finetune.cell import base_policy, demonstrations, run_cell
from benchmarks.finetune.methods import METHODS, Base
from benchmarks.finetune.tasks import TASKS
from benchmarks.parallel import run_cells
from robopolicy.training.parallel import parallel_map

Key = tuple[str, str, int]  # method, task, seed
Shared = tuple[str, int, tuple[Base, ...]]  # task, seed, bases


def run_all(keys: Sequence[Key], *, jobs: int, steps: int | None, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells: first their shared inputs, then the cells."""
    run, prepare = partial(_run, steps=steps), partial(_prepare, jobs=jobs)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=keep, prepare=prepare)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"finetune/{key[0]}-{key[1]}-{key[2]}"


def _run(key: Key, steps: int | None) -> dict[str, Any]:
    method, task, seed = key
    return run_cell(METHODS[method], TASKS[task], seed, steps=steps)


def _prepare(keys: Sequence[Key], jobs: int) -> None:
    datasets = dict.fromkeys((task, seed) for _, task, seed in keys)
    bases = {of: {METHODS[key[0]].base for key in keys if key[1:] == of} for of in datasets}
    make_shared([(*of, tuple(base for base in found if base)) for of, found in bases.items()], jobs=jobs)


def make_shared(shared: Sequence[Shared], *, jobs: int) -> None:
    """Collect missing demonstrations and clone missing bases, in one process per dataset."""
    for _, future in parallel_map(_make_shared, shared, jobs=jobs):
        future.result()


def _make_shared(what: Shared) -> None:
    task, seed, bases = what
    data = demonstrations(TASKS[task], seed)
    for base in bases:
        base_policy(base, TASKS[task], seed, data)


def _progress(cell: dict[str, Any]) -> str:
    key = "return_mean" if cell["finetuned"]["success"] is None else "success"
    before = "none" if cell["base"] is None else f"{cell['base'][key]:.3g}"
    return f"{before} -> {cell['finetuned'][key]:.3g} in {cell['seconds']:.0f} s"
