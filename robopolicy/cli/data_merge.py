"""`robopolicy data merge`: join datasets."""

from __future__ import annotations

import argparse
from pathlib import Path

from robopolicy.cli.options import add_overwrite_option

HELP = "join datasets of the same features and rate"
DESCRIPTION = (
    "Write the episodes of all datasets, in their order, as one dataset. Numbers, images and video files are copied as "
    "they are stored. meta/provenance.json names the sources."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the action."""
    parser.add_argument("datasets", nargs="+", type=Path, metavar="DATASET", help="dataset folders")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the joined dataset; return 0."""
    from robopolicy.data.formats.lerobot.copying import EpisodeCopier, describe_copy

    with EpisodeCopier(args.out, overwrite=args.overwrite, command="data merge") as copier:
        for path in args.datasets:
            copier.add(path)
    print(describe_copy(copier, args.out))
    return 0
