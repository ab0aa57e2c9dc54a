"""Options that several verbs share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from robopolicy.errors import UserError
from robopolicy.training.limits import check_count


def add_player_options(parser: argparse.ArgumentParser) -> None:
    """Options that `eval` and `play` share."""
    parser.add_argument("--task", help="task id (default: the one the checkpoint was trained on)")
    parser.add_argument("--seed", type=int, default=10_000, help="seed of the first episode (default: 10000)")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER[,FOLDER] (default: its own)")
    add_judge_option(parser)
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--stochastic", action="store_true", help="act with exploration noise")
    parser.add_argument("--device", default="cpu", help="where policies compute, and physics that can (default: cpu)")
    parser.add_argument("--camera", help="camera of the video (default: the task's own)")
    text = "world model in which policies try several chunks before they play the best (default: none)"
    parser.add_argument("--imagine", default="", metavar="FOLDER[,FOLDER]", help=text)
    parser.add_argument("--candidates", type=int, default=8, help="chunks tried with --imagine (default: 8)")
    parser.add_argument("--depth", type=int, default=1, help="decisions imagined with --imagine (default: 1)")
    parser.add_argument("--rounds", type=int, default=0, help="rounds that refine the best of them (default: 0)")


def add_judge_option(parser: argparse.ArgumentParser) -> None:
    """Who sees success in a world model."""
    text = "of a world model: folder of 'worldmodel judge', vlm:MODEL@URL or vlm:FOLDER (default: the model's own)"
    parser.add_argument("--judge", default="", help=text)


def check_alone(what: str) -> None:
    """Refuse `what` under `torchrun`, each of whose processes would do it again.

    Raises:
        UserError: There are several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"torchrun shares out one training run; call 'robopolicy {what}' without it.")


def check_numbers(args: argparse.Namespace, *, positive: Sequence[str], non_negative: Sequence[str]) -> None:
    """Refuse numbers that make no sense, by the name of their option."""
    for least, names in ((1, positive), (0, non_negative)):
        for name in names:
            check_count(f"--{name.replace('_', '-')}", getattr(args, name), least)
