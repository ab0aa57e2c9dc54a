"""`robopolicy data`: describe, convert, join, divide and edit datasets."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

ACTIONS = {  # modules with HELP, DESCRIPTION, `add_arguments` and `run`, in the order of the help
    "card": "robopolicy.cli.data_card",
    "convert": "robopolicy.cli.data_convert",
    "merge": "robopolicy.cli.data_merge",
    "split": "robopolicy.cli.data_split",
    "filter": "robopolicy.cli.data_filter",
    "edit": "robopolicy.cli.data_edit",
}

EXAMPLES = """\
examples:
  robopolicy data card data/lift
  robopolicy data card data/hopper --random 18.4 --best 3200
  robopolicy data card data/hopper --random data/random --best data/best --replay data/replay --json
  robopolicy data convert can_ph.hdf5 data/can
  robopolicy data convert pusht.zarr.zip data/pusht --rate 10 --task "push the T onto its outline"
  robopolicy data convert recordings data/pick --mapping pick.yaml
  robopolicy data convert data/can can_again.hdf5
  robopolicy data merge data/monday data/tuesday --out data/week
  robopolicy data split data/week --fraction 0.1 --out data/week_train data/week_test
  robopolicy data filter data/week --success --max-length 200 --exclude 7 12-14 --out data/week_good
  robopolicy data edit data/week --rename state=joints --remove image.wrist --out data/week_joints
  robopolicy data edit data/week --instruction "pick the block" --out data/week_named
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "data", description="Describe, convert, join, divide and edit datasets.", epilog=EXAMPLES
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, path in ACTIONS.items():
        module = import_module(path)
        module.add_arguments(actions.add_parser(name, help=module.HELP, description=module.DESCRIPTION))


def run(args: argparse.Namespace) -> int:
    """Run the action; return its exit code."""
    return import_module(ACTIONS[args.action]).run(args)
