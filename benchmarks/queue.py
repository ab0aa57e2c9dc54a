"""All missing cells of all studies, by priority.

    python -m benchmarks.queue --list                    # what is missing, running or failed, and an estimate
    python -m benchmarks.queue --jobs 2                  # run it at the lowest priority; Ctrl-C stops, again kills
    python -m benchmarks.queue --only control --cells 'ppo-*' 'sb3_ppo-*'
    python -m benchmarks.queue --retry-failed            # failed cells again; their errors are in WORK/CELL/failed.json
    python -m benchmarks.queue --tables                  # afterwards: write the tables of the finished cells

Start the same command again after any interruption, `kill -9` included. Runs of `robopolicy train` continue from their
last checkpoint. Several queues can share the folder of unfinished cells.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies import STUDIES, load_study
from benchmarks.study import WORK, finished, jobs, run_jobs, selected
from robopolicy.errors import UserError
from robopolicy.training.queue import Job, QueueFolder, remaining


def main() -> int:
    """Run or list the cells; return 0, 1 after failures, or 128 + signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the state of all cells without running them")
    parser.add_argument("--tables", action="store_true", help="write the tables of the studies without running cells")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=STUDIES, metavar="STUDY", help="studies")
    parser.add_argument("--cells", nargs="+", default=[], metavar="PATTERN", help="names of cells, e.g. 'ppo-hopper-*'")
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each (default: 2)")
    parser.add_argument("--work", type=Path, default=WORK, help=f"folder of unfinished cells (default: {WORK})")
    parser.add_argument("--retry-failed", action="store_true", help="run failed cells again")
    arguments = parser.parse_args()
    studies = [load_study(name) for name in arguments.only]
    if arguments.tables:
        from benchmarks.study_table import write_study

        for study in studies:
            write_study(study, finished(study))
        return 0
    try:
        chosen = selected([job for study in studies for job in jobs(study)], arguments.cells)
        if arguments.list:
            _print(chosen, QueueFolder(arguments.work), arguments.jobs)
            return 0
        work, retry = arguments.work, arguments.retry_failed
        return run_jobs(chosen, parallel=arguments.jobs, work=work, retry_failed=retry).exit_code
    except UserError as error:
        parser.error(str(error))


def _print(chosen: Sequence[Job], place: QueueFolder, parallel: int) -> None:
    """Print one line per unfinished cell, and the totals."""
    states = {job.name: place.state(job) for job in chosen}
    for job in sorted(chosen, key=lambda job: job.priority):
        state = states[job.name]
        if state != "done":
            error = f": {place.failure(job) or 'unknown error'}" if state == "failed" else ""
            print(f"{state:>11}  {job.name}{error}")
    unfinished = [job for job in chosen if states[job.name] not in ("done", "failed")]
    totals = ", ".join(f"{count} {state}" for state, count in sorted(Counter(states.values()).items()))
    print("; ".join(filter(None, (totals, remaining(unfinished, place, parallel)))))


if __name__ == "__main__":
    sys.exit(main())
