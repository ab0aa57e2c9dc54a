"""All fine-tuners from the same pretrained checkpoints, at equal environment steps: one table.

    python -m benchmarks.finetune --quick                      # lift, two methods, one seed, few steps, nothing written
    python -m benchmarks.finetune                              # everything missing; about 4 CPU minutes a cell
    python -m benchmarks.finetune --tasks lift --methods reinflow dsrl_na --seeds 0 1 2 --jobs 2
    python -m benchmarks.finetune --table                      # only rewrite the table from the finished cells

A cell is one method on one task with one seed: demonstrations, cloned base, fine-tuning, and 200 held-out episodes of
the base, the best checkpoint and the last checkpoint. The run's own eleven evaluations choose the best checkpoint; they
use other episodes and start before the first update. If the best checkpoint falls short of the base in fresh episodes,
the base replaces it, as in every `robopolicy train`. Finished cells are skipped, so the table grows over many runs.
"""

from __future__ import annotations

import argparse

from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.finetune.methods import METHODS, notes, standard
from benchmarks.finetune.runner import cell_name, run_all
from benchmarks.finetune.table import figures, rows
from benchmarks.finetune.tasks import TASKS


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two methods, one seed, few steps, no results written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([("reinflow", "lift", 0), ("dsrl_na", "lift", 0)], jobs=2, steps=10_000, keep=False)
        print_result("finetune", rows(cells), figures(cells))
        return
    if not arguments.table:
        keys = [(m, t, s) for t in arguments.tasks for s in arguments.seeds for m in arguments.methods or standard(t)]
        run_all(keys, jobs=arguments.jobs, steps=None, keep=True)
    cells = finished_cells(cell_name((m, t, s)) for t in TASKS for m in METHODS for s in range(100))
    print_result("finetune", rows(cells), figures(cells))
    command = "python -m benchmarks.finetune"
    write_result("finetune", rows(cells), figures(cells), command=command, notes=notes())


if __name__ == "__main__":
    main()
