"""Command line of a study."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.study import WORK, Study, finished, jobs, run_jobs, selected
from benchmarks.study_table import write_study
from robopolicy.errors import UserError


def main(study: Study) -> int:
    """Command line of a study: run its missing cells, then print and write its table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{study.name}", description=f"{study.question} {study.description}"
    )
    parser.add_argument("--quick", action="store_true", help="run a few small cells and print their table")
    parser.add_argument("--table", action="store_true", help="write the table of the finished cells without running")
    parser.add_argument("--cells", nargs="+", default=[], metavar="PATTERN", help="names of cells, e.g. 'ppo-hopper-*'")
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--work", type=Path, default=WORK, help=f"folder of unfinished cells (default: {WORK})")
    parser.add_argument("--retry-failed", action="store_true", help="run failed cells again")
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            small, cells = study.quick(), Path(folder) / "cells"
            report = run_jobs(jobs(small, cells), parallel=arguments.jobs, work=Path(folder) / "work")
            write_study(small, finished(small, cells), keep=False)
        return report.exit_code
    if not arguments.table:
        try:
            chosen = selected(jobs(study), arguments.cells)
            options = {"work": arguments.work, "retry_failed": arguments.retry_failed}
            report = run_jobs(chosen, parallel=arguments.jobs, **options)
        except UserError as error:
            parser.error(str(error))
        if report.signal:
            return report.exit_code
    write_study(study, finished(study))
    return 0
