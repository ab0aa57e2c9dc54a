"""`robopolicy data split`: divide a dataset at random into two."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from robopolicy.cli.options import add_overwrite_option, check_numbers
from robopolicy.errors import UserError

HELP = "divide a dataset at random into two, e.g. for training and test"
DESCRIPTION = (
    "Write two datasets, the second with a fraction of the episodes. Numbers, images and video files are copied as "
    "they are stored. meta/provenance.json names the source and its episodes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the action."""
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder of a LeRobot dataset")
    parser.add_argument(
        "--out", type=Path, nargs=2, required=True, metavar=("FIRST", "SECOND"), help="folders to write"
    )
    text = "of the episodes in the second dataset (default: 0.1)"
    parser.add_argument("--fraction", type=float, default=0.1, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: 0)")
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write both parts; return 0."""
    from robopolicy.data.formats.lerobot.copying import EpisodeCopier, describe_copy
    from robopolicy.data.formats.lerobot.reader import DatasetFiles
    from robopolicy.data.selection import split_indices

    check_numbers(args, positive=(), non_negative=("seed",))
    if not 0 < args.fraction < 1:
        raise UserError(f"--fraction must lie in (0, 1), got {args.fraction:g}.")
    if args.out[0].absolute() == args.out[1].absolute():
        raise UserError(f"--out needs two different folders, got {args.out[0]} twice.")
    count = len(DatasetFiles.open(args.dataset).rows(None))
    parts = split_indices(count, min(max(round(args.fraction * count), 1), count - 1), args.seed)
    command = f"data split --fraction {args.fraction:g} --seed {args.seed}"
    with ExitStack() as stack:  # neither appears before both are complete
        copiers = [
            stack.enter_context(EpisodeCopier(path, overwrite=args.overwrite, command=command)) for path in args.out
        ]
        for copier, part in zip(copiers, parts, strict=True):
            copier.add(args.dataset, part.tolist())
        for copier in copiers:
            copier.complete()
    for copier, path in zip(copiers, args.out, strict=True):
        print(describe_copy(copier, path))
    return 0
