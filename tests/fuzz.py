"""Search for counterexamples of `tests/properties` and for crashes of the chunk server, within a time budget.

    python tests/fuzz.py --seconds 1800

The properties take turns with new random seeds, and the server gets damaged frames. The run fails on the first
counterexample, which Hypothesis prints, or if the process grows by more than `MAX_GROWTH` after the first tenth.
"""

import argparse
import contextlib
import io
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import seed

os.environ["HYPOTHESIS_PROFILE"] = "fuzz"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in ("properties", "deploy", "helpers")]
import test_properties  # noqa: E402
from fuzz_server import fuzz  # noqa: E402
from served_toys import Shift  # noqa: E402

from robopolicy.deploy.server import running  # noqa: E402

EXAMPLES, FRAMES = 100, 2000  # per turn
MAX_GROWTH = 10 * 1024  # [KiB] of the largest resident memory
PROPERTIES = {name: test for name, test in vars(test_properties).items() if name.startswith("test_")}


def memory() -> int:
    """Largest resident memory so far [KiB]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Fuzz until the time is over; return 1 if the memory has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="time budget (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: 0)")
    given = parser.parse_args()
    start, number, counts = time.monotonic(), given.seed, Counter[str]()
    warm = 0
    with running(Shift()) as server:
        while (elapsed := time.monotonic() - start) < given.seconds:
            for name, test in PROPERTIES.items():
                with contextlib.redirect_stdout(io.StringIO()):
                    seed(number)(test)()
                counts[name] += EXAMPLES
            counts["frames"] += sum(fuzz(server.url, FRAMES, seed=number).values())
            number += 1
            if elapsed < given.seconds / 10 or not warm:
                warm = memory()
            sys.stdout.write(f"{elapsed:.0f} s: {sum(counts.values())} examples, {memory() // 1024} MiB\n")
            sys.stdout.flush()
    grown = memory() - warm
    sys.stdout.write("".join(f"{count:8} {name}\n" for name, count in sorted(counts.items())))
    sys.stdout.write(f"{grown} KiB more than after the first tenth\n")
    return int(grown > MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
