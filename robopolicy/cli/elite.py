"""`robopolicy elite`: take a policy out of the archive of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from robopolicy.errors import UserError

EXAMPLES = """\
examples:
  robopolicy elite runs/arm_dcg_map_elites
  robopolicy elite runs/arm_dcg_map_elites --descriptor 0.5 0.9 --out runs/arm_up
"""


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "elite",
        help="take a policy out of an archive",
        description="Show the archive of a run of dcg_map_elites, or write its elite nearest to a descriptor as a "
        "checkpoint, which ignores the descriptor that it is asked for.",
        epilog=EXAMPLES,
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument(
        "--descriptor", type=float, nargs="+", metavar="X", help="behaviour that is wanted, from 0 to 1 each"
    )
    parser.add_argument("--out", type=Path, help="checkpoint to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Show the archive, or take an elite out of it."""
    from robopolicy.training.repertoire import read_repertoire, save_elite

    if (args.descriptor is None) != (args.out is None):
        raise UserError("--descriptor and --out belong together; pass both, or none to see the archive.")
    if args.descriptor is not None:
        descriptor, fitness = save_elite(args.run, args.descriptor, args.out)
        content = {"out": str(args.out), "descriptor": descriptor, "fitness": fitness}
        shown = ", ".join(f"{value:.3f}" for value in descriptor)
        print(json.dumps(content) if args.json else f"{args.out}: descriptor ({shown}), fitness {fitness:.3f}")
        return 0
    archive = read_repertoire(args.run).archive
    metrics, elites = archive.metrics(), archive.elites()
    if args.json:
        print(json.dumps({**metrics, "descriptor": elites.descriptor.tolist(), "fitness": elites.fitness.tolist()}))
        return 0
    print(f"{args.run}: {len(elites)} elites")
    print(
        f"  coverage {metrics['coverage']:.1%}, QD score {metrics['qd_score']:.4g}, best {metrics['max_fitness']:.4g}"
    )
    return 0
