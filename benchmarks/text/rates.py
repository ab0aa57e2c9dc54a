"""Learning rate of every arm of the text benchmark: the better of two, with a seed and problems of its own.

Recipes without a bound on their ratios need smaller steps than the baseline. Every arm, the baseline included, gets the
same search, so that no verdict is about a learning rate that suits another arm. The first cell of an arm runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import finished_cells, load_cell, save_cell
from benchmarks.study import shared
from benchmarks.text.recipes import arms
from benchmarks.text.tasks import TASKS

RATES = (1e-3, 3e-4)
SEED = 0
WORK = Path("runs/text_rates")


def searched_rate(arm: str, task: str) -> float:
    """The better rate of an arm on a task; what is missing of the search runs first."""
    from benchmarks.text.cell import SEARCHED, run_cell

    for rate in RATES:
        name = cell_name(arm, task, rate)
        with shared(WORK / f"{arm}-{task}-{rate:g}"):
            if load_cell(name) is None:
                save_cell(name, run_cell(arm, task, SEED, tokens=TASKS[task].tokens, lr=rate, first=SEARCHED))
    return chosen_rate(search_of(arm, task))


def found_rate(arm: str, task: str) -> float | None:
    """The better rate of an arm on a task; None if its search is incomplete."""
    cells = search_of(arm, task)
    return chosen_rate(cells) if len(cells) == len(RATES) else None


def chosen_rate(cells: Sequence[dict[str, Any]]) -> float:
    """The rate with the highest success; the larger one of equals."""
    return max(cells, key=lambda cell: (sum(cell["after"]["wins"]), cell["lr"]))["lr"]


def search_of(arm: str, task: str) -> list[dict[str, Any]]:
    """The finished cells of the search of an arm on a task."""
    return finished_cells(cell_name(arm, task, rate) for rate in RATES)


def cell_name(arm: str, task: str, rate: float) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"text_rates/{arm}-{task}-{rate:g}"


def rows() -> list[dict[str, object]]:
    """One row per arm and task with a complete search: success before, with both rates, and the choice."""
    found: list[dict[str, object]] = []
    for task in TASKS:
        for arm in arms(task):
            cells = search_of(arm, task)
            if len(cells) == len(RATES):
                shown = {f"{cell['lr']:g}": f"{_success(cell, 'after'):.1%}" for cell in cells}
                before = {"task": task, "arm": arm, "before": f"{_success(cells[0], 'base'):.1%}"}
                found.append({**before, **shown, "chosen": f"{chosen_rate(cells):g}"})
    return found


def _success(cell: dict[str, Any], stage: str) -> float:
    return fmean(cell[stage]["wins"]) / cell["samples"]
