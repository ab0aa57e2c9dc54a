"""Command line of the study, which also draws its plot."""

import sys

from benchmarks import common
from benchmarks.composition.plot import plot
from benchmarks.composition.study import STUDY
from benchmarks.study import finished, main

if __name__ == "__main__":
    code = main(STUDY)
    if cells := [cell for cell in finished(STUDY) if "curves" in cell]:
        plot(cells, common.RESULTS / "composition_curve.png")
    sys.exit(code)
