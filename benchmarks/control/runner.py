"""Cell functions that worker processes import; they cannot import `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.control.cell import run_cell
from benchmarks.control.methods import METHODS
from benchmarks.control.tasks import TASKS
from benchmarks.parallel import run_cells

Key = tuple[str, str, int]  # method, task, seed


def run_all(keys: Sequence[Key], *, jobs: int, steps: dict[str, int], keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells, with the environment steps of `steps` for the families it names."""
    run = partial(_run, steps=steps)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=keep, current=current)


def current(cell: dict[str, Any]) -> bool:
    """Whether a finished cell has the environment steps of its family; other budgets are not comparable."""
    return cell["env_steps"] == METHODS[cell["method"]].family.env_steps


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"control/{key[0]}-{key[1]}-{key[2]}"


def _run(key: Key, steps: dict[str, int]) -> dict[str, Any]:
    name, task, seed = key
    method = METHODS[name]
    return run_cell(method, TASKS[task], seed, steps=steps.get(method.family.name))


def _progress(cell: dict[str, Any]) -> str:
    return cell["diverged"] or f"return {cell['return']:.0f} in {cell['seconds']:.0f} s"
