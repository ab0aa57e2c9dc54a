"""Offline learning on OGBench single tasks, with the published success at equal numbers of updates.

    python -m benchmarks.ogbench --methods qc_ifql --domains puzzle-3x3 --tasks 1 2 --data ~/ogbench-data
    python -m benchmarks.ogbench --table                 # only rewrite the table from the finished cells

Play data come from `python -m benchmarks.ogbench.generate`. Networks, chunks of 5, batches of 256 and the settings per
domain are published ones: those of Li and Levine 2026 (`fql`, `ifql`, `dsrl`: 10 critics, mean minus half a standard
deviation) and of Li et al. 2025 (`qc`, `qc_fql`, `qc_ifql`: 2 critics, mean). A cell is one method on one task with one
seed, evaluated in 50 episodes every 50,000 updates. Interrupted cells continue. CPU time of an update on one core with
bfloat16 instructions: qc_ifql 60 ms, qc_fql 113, ifql 158, fql 266, dsrl 568; `qc` needs a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import cells_named, print_result, write_result
from benchmarks.ogbench.methods import DOMAINS, METHODS, TASKS
from benchmarks.ogbench.runner import run_all
from benchmarks.ogbench.table import BUDGETS, figures, rows


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["qc_ifql"])
    parser.add_argument("--domains", nargs="+", choices=list(DOMAINS), default=["scene", "puzzle-3x3"])
    parser.add_argument("--tasks", nargs="+", type=int, choices=TASKS, default=list(TASKS))
    parser.add_argument("--updates", type=int, choices=BUDGETS, default=BUDGETS[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--data", type=Path, default=Path("~/ogbench-data"), help="folder of the play data")
    parser.add_argument("--jobs", type=int, default=1, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the table without running cells")
    arguments = parser.parse_args()
    if not arguments.table:
        keys = [
            (method, domain, task, arguments.updates, seed)
            for seed in arguments.seeds
            for task in arguments.tasks
            for domain in arguments.domains
            for method in arguments.methods
        ]
        data = arguments.data.expanduser()
        run_all(keys, jobs=arguments.jobs, data=data, precision=arguments.precision)
    found = figures(cells_named("ogbench/"))
    print_result("ogbench", rows(found), found)
    write_result("ogbench", rows(found), found, command="python -m benchmarks.ogbench")


if __name__ == "__main__":
    main()
