"""Implement `robopolicy visits`, which trains a network that orders visits by imitation of shortest paths (BQ-NCO)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from robopolicy.cli.options import check_numbers

COUNTS = (20, 50)  # visits of the table, in addition to the number in training

EXAMPLES = """\
examples:
  robopolicy visits
  robopolicy visits --dim 3 --visits 9 --out runs/visits_3d
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "visits",
        description="Train a network that orders visits, and report the length of its paths relative to the nearest "
        "neighbour heuristic (below 1 is better) and, for few visits, to the shortest path. `order_visits` of "
        "robopolicy.contrib.ordering.visits plans with the result.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--dim", type=int, default=2, help="coordinates of a point (default: 2)")
    parser.add_argument("--visits", type=int, default=8, help="points per training instance (default: 8)")
    parser.add_argument("--updates", type=int, default=5000, help="gradient steps (default: 5000)")
    parser.add_argument("--width", type=int, default=64, help="width of the transformer (default: 64)")
    parser.add_argument("--layers", type=int, default=3, help="layers of the transformer (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and instances (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/visits"), help="folder to write (default: runs/visits)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Train, save and report."""
    from robopolicy.cli.progress import progress_bars
    from robopolicy.contrib.ordering.network import VisitConfig, save_visits
    from robopolicy.contrib.ordering.visits import ratios, train_visits

    check_numbers(args, positive=("dim", "visits", "updates", "width", "layers"), non_negative=("seed",))
    config = VisitConfig(dim=args.dim, width=args.width, layers=args.layers)
    with progress_bars() as add_bar:
        advance = add_bar("updates", args.updates)
        policy = train_visits(
            config, updates=args.updates, visits=args.visits, seed=args.seed, progress=lambda update, _: advance(update)
        )
    save_visits(policy, args.out)
    found = {count: ratios(policy, count) for count in (args.visits, *COUNTS)}
    if args.json:
        rows = {count: {"over_nearest": near, "over_shortest": best} for count, (near, best) in found.items()}
        print(json.dumps({"out": str(args.out), "ratios": rows}))
        return 0
    print("visits   over nearest neighbor   over shortest")
    for count, (near, best) in found.items():
        print(f"{count:6d}   {near:21.3f}   {'-' if best is None else f'{best:.3f}':>13s}")
    print(f"saved to {args.out}")
    return 0
