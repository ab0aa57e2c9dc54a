"""Implement `robopolicy elite`, which extracts a policy from the archive of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, check_overwrite
from robopolicy.errors import UserError
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.contrib.quality_diversity.dcg_map_elites import DCGMAPElites
    from robopolicy.contrib.quality_diversity.stax import STAX

SHOWN = 6  # displayed numbers of a descriptor

EXAMPLES = """\
examples:
  robopolicy elite runs/arm_dcg_map_elites
  robopolicy elite runs/arm_dcg_map_elites --descriptor 0.5 0.9 --out runs/arm_up
  robopolicy elite runs/point_mass_stax --rank 2 --out runs/second
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "elite",
        description="Show the archive of a run of dcg_map_elites or stax, or write one of its policies as a "
        "checkpoint: the one nearest to a descriptor (the policy then ignores its descriptor observation), or the one "
        "at a rank by return.",
        epilog=EXAMPLES,
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--descriptor", type=float, nargs="+", metavar="X", help="target descriptor, each number in [0, 1]"
    )
    which.add_argument("--rank", type=int, help="rank by return, 1 is the highest")
    parser.add_argument("--out", type=Path, help="checkpoint to write")
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Show the archive, or extract an elite."""
    from robopolicy.contrib.quality_diversity.archive import LAST, nearest, ranked, read_archive, save_elite
    from robopolicy.files import check_new_folder
    from robopolicy.training.manifest import MANIFEST

    if (args.descriptor is None and args.rank is None) != (args.out is None):
        raise UserError("--out needs --descriptor or --rank, and vice versa; pass both, or none to show the archive.")
    check_overwrite(args, "--out")
    if args.out is not None:
        check_new_folder(args.out, "a checkpoint", MANIFEST, overwrite=args.overwrite, sources=[args.run / LAST])
    learner = read_archive(args.run)
    if args.out is None:
        return _show(args, learner)
    if args.rank is not None:
        elite = ranked(args.run, learner, args.rank)
    else:
        assert args.descriptor is not None  # as --out was passed
        elite = nearest(args.run, learner, args.descriptor)
    save_elite(args.run, learner, elite, args.out)
    found, fitness = elite.descriptor[0].tolist(), float(elite.fitness[0])
    content = {"out": str(args.out), "descriptor": found, "fitness": fitness}
    shown = ", ".join(f"{value:.3f}" for value in found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
    print(json.dumps(content) if args.json else f"{args.out}: descriptor ({shown}), fitness {fitness:.3f}")
    return 0


def _show(args: argparse.Namespace, learner: DCGMAPElites | STAX) -> int:
    from robopolicy.contrib.quality_diversity.stax import STAX

    elites = learner.elites()
    cells = {} if isinstance(learner, STAX) else learner.archive.metrics()
    if args.json:
        print(json.dumps({**cells, "descriptor": elites.descriptor.tolist(), "fitness": elites.fitness.tolist()}))
        return 0
    best = f"{float(elites.fitness.max()):.4g}" if len(elites) else "none"
    kept = f"coverage {cells['coverage']:.1%}, QD score {cells['qd_score']:.4g}, " if cells else ""
    print(f"{args.run}: {counted(len(elites), 'elite')}")
    print(f"  {kept}best {best}")
    return 0
