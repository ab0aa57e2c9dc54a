"""Learning rate of every arm of the text benchmark: the better of two, with a seed that the table does not use.

    python -m benchmarks.text.rates             # everything missing; about a CPU minute a cell
    python -m benchmarks.text.rates --jobs 1

Recipes without a bound on their ratios need smaller steps than the baseline. Every arm, the baseline included, gets the
same search, so that no verdict is about a learning rate that suits another arm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.common import RESULTS, print_result, write_result
from benchmarks.parallel import run_cells
from benchmarks.text.recipes import arms
from benchmarks.text.tasks import TASKS
from robopolicy.errors import UserError

RATES = (1e-3, 3e-4)
SEED = 0
COMMAND = "python -m benchmarks.text.rates"

Key = tuple[str, str, float]  # arm, task, learning rate


def learning_rate(arm: str, task: str) -> float:
    """The chosen learning rate of an arm on a task.

    Raises:
        UserError: The search did not run for this arm.
    """
    chosen = found_rate(arm, task)
    if chosen is None:
        raise UserError(f"No learning rate of {arm} on {task}; run: {COMMAND}")
    return chosen


def found_rate(arm: str, task: str) -> float | None:
    """The chosen learning rate of an arm on a task; None if the search did not run."""
    return _chosen().get(f"{arm}-{task}")


@cache
def _chosen() -> dict[str, float]:
    file = RESULTS / "text_rates.json"
    return json.loads(file.read_text(encoding="utf-8"))["chosen"] if file.exists() else {}


def run(key: Key) -> dict[str, Any]:
    """Train one arm with one learning rate."""
    from benchmarks.text.cell import run_cell

    arm, task, rate = key
    return run_cell(arm, task, SEED, tokens=TASKS[task].tokens, lr=rate)


def choose(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The rate with the highest success for every arm and task that ran with all; the larger one of equals."""
    found: dict[str, dict[float, int]] = {}
    for cell in cells:
        found.setdefault(f"{cell['recipe']}-{cell['task']}", {})[cell["lr"]] = sum(cell["after"]["wins"])
    return {name: max(wins, key=lambda rate: (wins[rate], rate)) for name, wins in found.items() if len(wins) > 1}


def rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """One row per arm and task."""
    success = {(cell["recipe"], cell["task"], cell["lr"]): f"{_success(cell, 'after'):.1%}" for cell in cells}
    chosen = choose(cells)
    before = {cell["task"]: f"{_success(cell, 'base'):.1%}" for cell in cells}
    return [
        {
            "task": task,
            "arm": arm,
            "before": before[task],
            **{f"{rate:g}": success.get((arm, task, rate), "-") for rate in RATES},
            "chosen": f"{chosen.get(f'{arm}-{task}', '-')}",
        }
        for task in TASKS
        for arm in arms(task)
        if task in before
    ]


def _success(cell: dict[str, Any], stage: str) -> float:
    return fmean(cell[stage]["wins"]) / cell["samples"]


def _name(key: Key) -> str:
    arm, task, rate = key
    return f"text_rates/{arm}-{task}-{rate:g}"


def _progress(cell: dict[str, Any]) -> str:
    return f"{_success(cell, 'base'):.0%} -> {_success(cell, 'after'):.0%}"


def main() -> None:
    """Run every missing cell, then print and write the choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    jobs = parser.parse_args().jobs
    keys = [(arm, task, rate) for task in TASKS for arm in arms(task) for rate in RATES]
    cells = run_cells(keys, run, name=_name, progress=_progress, jobs=jobs, keep=True)
    figures = {"seed": SEED, "chosen": choose(cells)}
    print_result("text_rates", rows(cells), figures)
    write_result("text_rates", rows(cells), figures, command=COMMAND)


if __name__ == "__main__":
    main()
