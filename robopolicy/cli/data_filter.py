"""`robopolicy data filter`: choose episodes of a dataset."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from robopolicy.cli.options import add_overwrite_option, check_numbers, reject_unused
from robopolicy.errors import UserError
from robopolicy.plurals import counted

HELP = "choose episodes by success, length, quality and number"
DESCRIPTION = (
    "Write the episodes that meet all conditions. Numbers, images and video files are copied as they are stored; a "
    "video file that also holds other episodes keeps their frames. meta/provenance.json names the source and its "
    "episodes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the action."""
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder of a LeRobot dataset")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    outcome = parser.add_mutually_exclusive_group()
    outcome.add_argument("--success", action="store_true", help="episodes with a successful step")
    outcome.add_argument("--failure", action="store_true", help="episodes without a successful step")
    parser.add_argument("--min-length", type=int, default=0, help="control steps, at least (default: 0)")
    parser.add_argument("--max-length", type=int, help="control steps, at most (default: no limit)")
    parser.add_argument("--min-return", type=float, default=-math.inf, help="undiscounted return, at least")
    text = "trajectory quality, at least: 0 is the return of --random, 1 of --best"
    parser.add_argument("--min-quality", type=float, default=-math.inf, help=text)
    parser.add_argument("--random", type=float, metavar="RETURN", help="mean return of random actions")
    parser.add_argument("--best", type=float, metavar="RETURN", help="mean return of the best policy")
    text = "fraction of steps without a change of state or action, at most (default: 1)"
    parser.add_argument("--max-idle", type=float, default=1.0, help=text)
    text = "episodes to choose from, from 0, e.g. 0-9 12 (default: all)"
    parser.add_argument("--episodes", nargs="+", metavar="N", help=text)
    parser.add_argument("--exclude", nargs="+", default=[], metavar="N", help="episodes to leave out, e.g. 3 7-9")
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the chosen episodes; return 0."""
    from robopolicy.data.formats.lerobot import read_lerobot
    from robopolicy.data.formats.lerobot.copying import EpisodeCopier, describe_copy
    from robopolicy.data.selection import EpisodeFilter

    check_numbers(args, positive=(), non_negative=("min_length",))
    for name in ("min_return", "min_quality", "max_idle", "random", "best"):
        if math.isnan(getattr(args, name) or 0.0):
            raise UserError(f"--{name.replace('_', '-')} must be a number, got nan.")
    references = None if args.random is None or args.best is None else (args.random, args.best)
    if args.min_quality == -math.inf:
        reject_unused(args, "without --min-quality", "--random", "--best")
    elif references is None:
        raise UserError("--min-quality requires both --random and --best.")
    episodes = read_lerobot(args.dataset, images=False)
    excluded = set(_numbers("--exclude", args.exclude))
    chosen = range(episodes.num_episodes) if args.episodes is None else _numbers("--episodes", args.episodes)
    conditions = EpisodeFilter(
        numbers=tuple(number for number in chosen if number not in excluded),
        success=True if args.success else False if args.failure else None,
        min_length=args.min_length,
        max_length=args.max_length,
        min_return=args.min_return,
        min_quality=args.min_quality,
        references=references,
        max_idle=args.max_idle,
    )
    numbers = conditions.choose(episodes).tolist()
    if not numbers:
        count = counted(episodes.num_episodes, "episode")
        raise UserError(f"No episode of {args.dataset}, which has {count}, meets the conditions.")
    with EpisodeCopier(args.out, overwrite=args.overwrite, command="data filter") as copier:
        copier.add(args.dataset, numbers)
    print(f"{describe_copy(copier, args.out)}, of {episodes.num_episodes}")
    return 0


def _numbers(option: str, words: list[str]) -> list[int]:
    """Parse numbers and ranges such as `0-9`."""
    found: list[int] = []
    for word in (part for text in words for part in text.split(",") if part):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UserError(f"{option} takes numbers and ranges such as 0-9, got '{word}'.")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
