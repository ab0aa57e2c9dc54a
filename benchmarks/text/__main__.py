"""Command line of the study, which also draws its plot."""

import sys

from benchmarks import common
from benchmarks.study import finished, main
from benchmarks.study_table import tabulate
from benchmarks.text.plot import plot
from benchmarks.text.study import STUDY

if __name__ == "__main__":
    code = main(STUDY)
    if cells := finished(STUDY):
        plot(tabulate(STUDY, cells), common.RESULTS / "text.png")
    sys.exit(code)
