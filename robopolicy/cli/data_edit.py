"""`robopolicy data edit`: rename or remove keys of a dataset, name entries, and set the instruction."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from robopolicy.cli.options import add_overwrite_option
from robopolicy.errors import UserError

HELP = "rename or remove keys, name entries, set the instruction"
DESCRIPTION = (
    "Write a changed copy. Keys name entries of episodes, e.g. state or image.front, or features of LeRobot. Numbers, "
    "images and video files are copied as they are stored."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the action."""
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder of a LeRobot dataset")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--rename", nargs="+", default=[], metavar="KEY=NEW", help="keys to rename")
    parser.add_argument("--remove", nargs="+", default=[], metavar="KEY", help="keys to remove")
    text = "names of the entries of vectors, with units, e.g. 'action=shoulder [rad],elbow [rad]'"
    parser.add_argument("--names", nargs="+", default=[], metavar="KEY=NAME,...", help=text)
    parser.add_argument("--instruction", metavar="TEXT", help="instruction or task id of all episodes")
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the changed dataset; return 0."""
    from robopolicy.data.formats.lerobot.copying import Edit, EpisodeCopier, describe_copy

    names = {
        key: tuple(name.strip() for name in text.split(",")) for key, text in _pairs("--names", args.names).items()
    }
    edit = Edit(_pairs("--rename", args.rename), tuple(args.remove), names, args.instruction)
    if edit == Edit():
        raise UserError("Nothing is changed; pass --rename, --remove, --names or --instruction.")
    with EpisodeCopier(args.out, edit=edit, overwrite=args.overwrite, command="data edit") as copier:
        copier.add(args.dataset)
    print(describe_copy(copier, args.out))
    return 0


def _pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise UserError(f"{option} takes pairs such as state=position, got '{word}'.")
        pairs[key] = value
    return pairs
