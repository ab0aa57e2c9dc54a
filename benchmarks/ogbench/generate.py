"""Generate OGBench play data with the plan oracles of the package, in the layout of OGBench's own files.

    python -m benchmarks.ogbench.generate scene-v0 --out ~/ogbench-data/scene-play-v0.npz --processes 2

The settings come from OGBench's generation script for `play`: 1,000 episodes of 1,001 steps (3,000 or 5,000 episodes
of the largest cubes and puzzles), noise 0.1 smoothed with 0.5, and a new random target whenever the oracle has reached
the last one. With equal random draws the data equal its output to the last bit. Episode i depends only on
`--seed` and i, so that a killed run continues from its finished blocks, and the number of processes has no effect.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.ogbench.play_data import generate, published_episodes


def main() -> None:
    """Generate the data named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("env", help="environment of OGBench, e.g. scene-v0, puzzle-3x3-v0, cube-double-v0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="file to write")
    parser.add_argument("--episodes", type=int, help="default: as in the published data")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (default: 0)")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    args = parser.parse_args()
    generate(args.env, args.out, args.episodes or published_episodes(args.env), args.seed, args.processes)


if __name__ == "__main__":
    main()
