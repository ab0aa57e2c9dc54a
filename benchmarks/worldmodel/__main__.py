"""A dozen policies of graded quality: their ranking in a learned world model, by FQE, and in the simulator.

    python -m benchmarks.worldmodel --quick                # six policies, one small world, nothing written
    python -m benchmarks.worldmodel                        # everything missing; see below
    python -m benchmarks.worldmodel --tasks push --seeds 0 --jobs 2
    python -m benchmarks.worldmodel --table                # only rewrite the table from the finished cells
    python -m benchmarks.worldmodel --tasks push-few push-narrow    # ablations of push: less data, two behaviours

A cell is one policy on one task with one seed: 100 held-out starts in the simulator and in the world model, and its
value by FQE on the recorded episodes that trained the world model. Recordings, world model and policies are made first
and stored. The recordings contain none of the ranked policies. On one idle core an update of the autoencoder takes
0.08 s and an update of the denoiser 0.43 s, so a task needs an hour for recordings, world model and policies, and about
five minutes per cell.
"""

from __future__ import annotations

import argparse

from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.worldmodel.cell import Key, cell_name, run_all
from benchmarks.worldmodel.table import figures, rows
from benchmarks.worldmodel.tasks import ABLATIONS, SMALL, TASKS


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six policies, one small world, no results written")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, *ABLATIONS], default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([(SMALL.name, player, 0) for player in SMALL.players], jobs=arguments.jobs, keep=False)
        print_result("worldmodel", rows(cells), figures(cells))
        return
    if not arguments.table:
        run_all(keys(arguments.tasks, arguments.seeds), jobs=arguments.jobs, keep=True)
    cells = finished_cells(cell_name(key) for key in keys([*TASKS, *ABLATIONS], range(100)))
    print_result("worldmodel", rows(cells), figures(cells))
    write_result("worldmodel", rows(cells), figures(cells), command="python -m benchmarks.worldmodel")


def keys(tasks: list[str], seeds: list[int] | range) -> list[Key]:
    """Every policy of `tasks`."""
    return [(task, player, seed) for task in tasks for seed in seeds for player in (TASKS | ABLATIONS)[task].players]


if __name__ == "__main__":
    main()
