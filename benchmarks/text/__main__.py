"""All online recipes on two generated tasks, some on tasks that grade their specific goal, at equal tokens: one table.

    python -m benchmarks.text --quick                        # two recipes, one task, few tokens, nothing written
    python -m benchmarks.text                                # everything missing; a CPU minute a cell or less
    python -m benchmarks.text --tasks arithmetic --recipes grpo dapo --seeds 1 2 3 --jobs 2
    python -m benchmarks.text --table                        # only rewrite table and picture from the finished cells

A cell is one recipe on one task with one seed. All cells of a task start from one checkpoint trained by `text_sft`,
generate the same number of tokens (to within a batch) and take four gradient steps per batch. Plain policy gradients,
which have no ratio, and recipes that request it take one step. Cells are evaluated on held-out prompts: accuracy of the
most likely answers, pass@k, entropy, length, form and tool calls of sampled answers. A recipe that needs data that a
task does not record is listed below the table with that reason. Every recipe has a claim (`claims.py`) and gets a
verdict on it. Finished cells are skipped, so the table grows over many runs.
"""

from __future__ import annotations

import argparse

from benchmarks import common
from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.text.cell import TASKS, online_recipes
from benchmarks.text.plot import plot
from benchmarks.text.runner import cell_name, run_all
from benchmarks.text.table import figures, refusals, rows


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two recipes, one task, few tokens, no results written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--recipes", nargs="+", choices=online_recipes(), default=online_recipes())
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([("grpo", "arithmetic", 0), ("gspo", "arithmetic", 0)], jobs=1, tokens=6_000, keep=False)
        print_result("text", rows(cells), figures(cells))
        return
    if not arguments.table:
        pairs = [(r, t) for t in arguments.tasks for r in arguments.recipes if TASKS[t].plays(r)]
        keys = [(recipe, task, seed) for seed in arguments.seeds for recipe, task in pairs]
        run_all(keys, jobs=arguments.jobs, tokens=None, keep=True)
    cells = finished_cells(cell_name((r, t, s)) for t in TASKS for r in online_recipes() for s in range(100))
    table, found = rows(cells), figures(cells)
    print_result("text", table, found)
    write_result("text", table, found, command="python -m benchmarks.text", notes=refusals(cells))
    plot(found, common.RESULTS / "text.png")


if __name__ == "__main__":
    main()
