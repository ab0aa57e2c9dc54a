"""Command line of the study."""

import sys

from benchmarks.her.study import STUDY
from benchmarks.study_command import main

if __name__ == "__main__":
    sys.exit(main(STUDY))
