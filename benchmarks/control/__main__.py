"""Training from scratch: every learner against Stable-Baselines3's PPO or SAC, at equal environment steps.

    python -m benchmarks.control --quick                  # hopper, two learners and two baselines, nothing written
    python -m benchmarks.control                          # everything missing, 5 seeds: about 12 CPU hours
    python -m benchmarks.control --tasks hopper --methods sb3_ppo bpo --seeds 0 1 2 --jobs 2
    python -m benchmarks.control --table                  # only rewrite table and curves from the finished cells

Hopper, HalfCheetah and Walker2d in the same simulator for all: 102,400 environment steps of the on-policy learners
(about 75 CPU seconds), 30,000 of the off-policy learners (about 180); `methods.py` has the sizes. A cell is one learner
on one task with one seed. Its score is the mean return of the last policy in 50 held-out episodes with deterministic
actions, scaled by the reference returns of `tasks.py`; a run that diverges scores 0. Finished cells are skipped unless
their environment steps differ from the current budget, so the table grows over many runs.
"""

from __future__ import annotations

import argparse

from benchmarks import common
from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.control.methods import FAMILIES, METHODS, OFF_POLICY, ON_POLICY, notes
from benchmarks.control.runner import cell_name, current, run_all
from benchmarks.control.table import figures, plot, rows
from benchmarks.control.tasks import TASKS

QUICK = ("sb3_ppo", "bpo", "sb3_sac", "dsac_t")


def main() -> None:
    """Run the missing cells, then print and write the table and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one task, one seed, few steps, no results written")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        few = {ON_POLICY.name: 16_384, OFF_POLICY.name: 2_000}
        cells = run_all([(name, "hopper", 0) for name in QUICK], jobs=2, steps=few, keep=False)
        found = figures(cells)
        print_result("control", rows(found), found)
        return
    if not arguments.table:
        keys = [(m, t, s) for s in arguments.seeds for t in arguments.tasks for m in arguments.methods]
        run_all(keys, jobs=arguments.jobs, steps={}, keep=True)
    finished = finished_cells(cell_name((m, t, s)) for t in TASKS for m in METHODS for s in range(100))
    cells = [cell for cell in finished if current(cell)]
    found = figures(cells)
    print_result("control", rows(found), found)
    write_result("control", rows(found), found, command="python -m benchmarks.control", notes=notes())
    for family in FAMILIES:
        plot(cells, family, common.RESULTS / f"control_{family.name}.png")


if __name__ == "__main__":
    main()
