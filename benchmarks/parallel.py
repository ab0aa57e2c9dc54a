"""Running the missing cells of a benchmark in processes, each on one thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.common import load_cell, save_cell
from robopolicy.training.parallel import parallel_map

Cell = dict[str, Any]
Key = TypeVar("Key")


def run_cells(
    keys: Sequence[Key],
    run: Callable[[Key], Cell],
    *,
    name: Callable[[Key], str],
    progress: Callable[[Cell], str],
    jobs: int,
    keep: bool,
    prepare: Callable[[Sequence[Key]], None] | None = None,
    current: Callable[[Cell], bool] = bool,
) -> list[Cell]:
    """The cells of `keys`; missing cells run in `jobs` processes, and failed cells are left out.

    Args:
        keys: Keys of the cells.
        run: Runs one cell; a function of an importable module, because other processes cannot import `__main__`.
        name: Place of a cell under `benchmarks/results/cells`.
        progress: One line about a finished cell.
        jobs: Number of parallel cells.
        keep: Load finished cells, and write new ones.
        prepare: Called with the keys of the missing cells, to make their shared inputs.
        current: Whether a finished cell is up to date; others run again.
    """
    found = {key: load_cell(name(key)) if keep else None for key in keys}
    cells = {key: cell if cell is not None and current(cell) else None for key, cell in found.items()}
    missing = [key for key, cell in cells.items() if cell is None]
    if prepare is not None:
        prepare(missing)
    for key, future in parallel_map(run, missing, jobs=jobs):
        if (error := future.exception()) is not None:
            print(f"{name(key)}: FAILED: {error}", file=sys.stderr, flush=True)
            continue
        cells[key] = cell = future.result()
        print(f"{name(key)}: {progress(cell)}", flush=True)
        if keep:
            save_cell(name(key), cell)
    return [cell for cell in cells.values() if cell is not None]
