"""Cell functions that worker processes import; they cannot import `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ogbench.cell import run_cell
from benchmarks.ogbench.methods import DOMAINS, METHODS
from benchmarks.parallel import run_cells

Key = tuple[str, str, int, int, int]  # method, domain, task, updates, seed


def run_all(keys: Sequence[Key], *, jobs: int, data: Path, precision: str) -> list[dict[str, Any]]:
    """Run the missing cells with the files of `data`."""
    run = partial(_run, data=data, precision=precision)
    return run_cells(keys, run, name=cell_name, progress=_progress, jobs=jobs, keep=True)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    method, domain, task, updates, seed = key
    return f"ogbench/{method}-{domain}-task{task}-{updates}-{seed}"


def _run(key: Key, data: Path, precision: str) -> dict[str, Any]:
    method, domain, task, updates, seed = key
    return run_cell(METHODS[method], DOMAINS[domain], task, seed, updates=updates, data=data, precision=precision)


def _progress(cell: dict[str, Any]) -> str:
    reached = ", ".join(f"{100 * rate:.0f} % at {int(updates):,}" for updates, rate in cell["success"].items())
    return f"success {reached} updates in {cell['seconds'] / 3600:.1f} h"
