"""Cells of benchmarks that are no studies, run by the same queue."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import common
from benchmarks.study import WORK
from robopolicy.training.queue import Job, run_queue

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
) -> list[Cell]:
    """The finished cells of `keys`; missing cells run first, and failed cells are left out.

    Args:
        keys: Keys of the cells.
        run: Runs one cell, which is stored with its processor and versions; a function of an importable module.
        name: Place of a cell under `benchmarks/results/cells`.
        progress: One line about a finished cell.
        jobs: Number of parallel cells.
        keep: Load finished cells, and keep new ones.
        prepare: Called with the keys of the missing cells, to make their shared inputs.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = common.RESULTS / "cells" if keep else Path(temporary) / "cells"
        files = {key: root / f"{name(key)}.json" for key in keys}
        if prepare is not None:
            prepare([key for key, file in files.items() if not file.exists()])
        queued = [
            Job(name(key), partial(_run, run, key, file), file.exists, describe=partial(_describe, progress, file))
            for key, file in files.items()
        ]
        run_queue(queued, WORK if keep else Path(temporary) / "work", parallel=jobs, retry_failed=True)
        return [_read(file) for file in files.values() if file.exists()]


def _run(run: Callable[[Any], Cell], key: object, file: Path, _: Path) -> None:
    common.save_json(file, {**run(key), "made_on": common.made_on()})


def _describe(progress: Callable[[Cell], str], file: Path) -> str:
    return progress(_read(file))


def _read(file: Path) -> Cell:
    return json.loads(file.read_text(encoding="utf-8"))
