"""Cell functions that worker processes import; they cannot import `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.composition.cell import OPERATORS, Settings, run_cell
from benchmarks.composition.tasks import TASKS
from benchmarks.parallel import run_cells

Key = tuple[str, int]  # task, seed


def run_all(keys: Sequence[Key], *, jobs: int, settings: Settings, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells."""
    run = partial(_run, settings=settings)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=keep)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"composition/pair-{key[0]}-{key[1]}"


def _run(key: Key, settings: Settings) -> dict[str, Any]:
    task, seed = key
    return run_cell(TASKS[task], seed, settings)


def _progress(cell: dict[str, Any]) -> str:
    def success(name: str) -> str:
        outcomes = cell["held_out"][name]["success"]
        return f"{sum(outcomes) / len(outcomes):.0%}"

    parents = " and ".join(success(name) for name in cell["parents"])
    composed = ", ".join(f"{name} {success(name)}" for name in OPERATORS)
    return f"{parents} -> {composed} in {cell['seconds']:.0f} s"
