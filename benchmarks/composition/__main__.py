"""Compositions of two parent policies compared with each parent: a table and a curve over the weight.

    python -m benchmarks.composition --quick                   # lift, one seed, small budgets, nothing written
    python -m benchmarks.composition                           # everything missing
    python -m benchmarks.composition --tasks lift push --seeds 0 1 2 --jobs 2
    python -m benchmarks.composition --table                   # only rewrite the tables from the finished cells

A cell is one task with one seed: demonstrations, two parents, the weights of the convex and OR compositions from a grid
search with 50 episodes each, and 200 episodes of both parents and all compositions that neither training nor search
uses. The first parent is also trained again with another seed: alone it is the null arm, and composed with the first
one it shows what an ensemble of equal parents gains. Verdicts are over seeds, with Holm's correction over the table.
Finished cells are skipped, so the tables grow over many runs; an interrupted cell continues from its files in
`runs/composition`. Meta-World has 50 starts per task, so its held-out seeds repeat starts of the demonstrations; only
the noise of the policies is new.
"""

from __future__ import annotations

import argparse

from benchmarks.common import RESULTS, finished_cells, print_result, write_result
from benchmarks.composition.cell import Settings
from benchmarks.composition.runner import cell_name, run_all
from benchmarks.composition.table import curve_rows, figures, notes, plot, rows
from benchmarks.composition.tasks import TASKS

QUICK = Settings(search_episodes=10, divisions=2, episodes=32, updates=200, rounds=5)
COMMAND = "python -m benchmarks.composition"


def main() -> None:
    """Run the missing cells, then print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small cell, no results written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([("lift", 0)], jobs=1, settings=QUICK, keep=False)
        print_result("composition", rows(cells), figures(cells))
        return
    if not arguments.table:
        keys = [(task, seed) for task in arguments.tasks for seed in arguments.seeds]
        run_all(keys, jobs=arguments.jobs, settings=Settings(), keep=True)
    cells = finished_cells(cell_name((task, seed)) for task in TASKS for seed in range(100))
    print_result("composition", rows(cells), figures(cells))
    write_result("composition", rows(cells), figures(cells), command=COMMAND, notes=notes(cells))
    write_result("composition_curve", curve_rows(cells), figures(cells), command=COMMAND)
    plot(cells, RESULTS / "composition_curve.png")


if __name__ == "__main__":
    main()
