"""Well-known text recipes on generated tasks with turns and tools, at equal numbers of generated tokens: one table.

    python -m benchmarks.text --quick                        # two arms, one task, few tokens, nothing written
    python -m benchmarks.text                                # everything missing, the baseline and the null arm first
    python -m benchmarks.text --tasks arithmetic --recipes grpo dapo --seeds 1 2 3 --jobs 2
    python -m benchmarks.text --table                        # only rewrite table and plot from the finished cells

A cell is one arm on one task with one seed. All arms of a seed start from the same imitated policy, generate the same
number of tokens (to within a batch) and take four gradient steps per batch, or one without a ratio. Cells are evaluated
on problems whose contents are not in training. The unit of an interval is the seed, which covers imitation and
training. The null arm is the baseline with other prompts and samples. A recipe gets a verdict only where its mechanism
acts (`mechanism.py`). Finished cells are skipped, so the table grows over many runs.
"""

from __future__ import annotations

import argparse

from benchmarks import common
from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.text.plot import plot
from benchmarks.text.recipes import arms
from benchmarks.text.runner import cell_keys, cell_name, run_all
from benchmarks.text.table import figures, notes, rows
from benchmarks.text.tasks import TASKS

SEEDS = list(range(1, 11))


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two arms, one task, few tokens, no results written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument(
        "--recipes", nargs="+", choices=sorted({arm for task in TASKS for arm in arms(task)}), default=[]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        keys = [("grpo", "arithmetic", 0), ("gspo", "arithmetic", 0)]
        cells = run_all(keys, jobs=1, tokens=6_000, keep=False)
        print_result("text", rows(cells), figures(cells))
        return
    if not arguments.table:
        keys = cell_keys(arguments.tasks, arguments.seeds, arguments.recipes)
        run_all(keys, jobs=arguments.jobs, tokens=None, keep=True)
    cells = finished_cells(map(cell_name, cell_keys(list(TASKS), range(100))))
    table, found = rows(cells), figures(cells)
    print_result("text", table, found)
    write_result("text", table, found, command="python -m benchmarks.text", notes=notes(cells))
    if cells:
        plot(found, common.RESULTS / "text.png")


if __name__ == "__main__":
    main()
