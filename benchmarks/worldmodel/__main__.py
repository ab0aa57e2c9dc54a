"""Command line of the study."""

import sys

from benchmarks.study_command import main
from benchmarks.worldmodel.study import STUDY

if __name__ == "__main__":
    sys.exit(main(STUDY))
