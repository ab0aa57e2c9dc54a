"""Policies of graded quality: their values and order in a learned world model, and in the simulator.

    python -m benchmarks.worldmodel --quick                # three policies, one small world, nothing written
    python -m benchmarks.worldmodel                        # everything missing; see below
    python -m benchmarks.worldmodel --tasks push --seeds 0 --jobs 2
    python -m benchmarks.worldmodel --table                # only rewrite the tables from the finished cells
    python -m benchmarks.worldmodel --tasks lift-few lift-narrow --seeds 0    # ablations of lift

A cell is one policy on one task with one seed: 100 held-out starts in the simulator and in the world model, and 50 of
its real episodes replayed in the world model, which separates errors of model and success head from reactions of the
policy to predicted frames. Recordings, world model and policies are made first, stored, and new for every seed; an
interrupted world model resumes. The recordings contain none of the ranked policies. On one idle core a seed of a task
takes about 25 minutes for recordings, world model and policies, and a cell one minute.
"""

from __future__ import annotations

import argparse

from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.worldmodel.cell import Key, cell_name, run_all
from benchmarks.worldmodel.table import figures, policy_rows, rows
from benchmarks.worldmodel.tasks import ABLATIONS, SMALL, TASKS

COMMAND = "python -m benchmarks.worldmodel"


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three policies, one small world, no results written")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, *ABLATIONS], default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([(SMALL.name, policy, 0) for policy in SMALL.policies], jobs=arguments.jobs, keep=False)
        print_result("worldmodel", rows(cells), figures(cells))
        return
    if not arguments.table:
        run_all(keys(arguments.tasks, arguments.seeds), jobs=arguments.jobs, keep=True)
    cells = finished_cells(cell_name(key) for key in keys([*TASKS, *ABLATIONS], range(100)))
    print_result("worldmodel", rows(cells), figures(cells))
    write_result("worldmodel", rows(cells), figures(cells), command=COMMAND)
    write_result("worldmodel_policies", policy_rows(cells), {}, command=COMMAND)


def keys(tasks: list[str], seeds: list[int] | range) -> list[Key]:
    """Every policy of `tasks`."""
    return [(task, name, seed) for seed in seeds for task in tasks for name in (TASKS | ABLATIONS)[task].policies]


if __name__ == "__main__":
    main()
