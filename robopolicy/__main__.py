"""`python -m robopolicy COMMAND ...`, the same as `robopolicy COMMAND ...`."""

import sys

from robopolicy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
