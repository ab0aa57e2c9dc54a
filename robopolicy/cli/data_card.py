"""`robopolicy data card`: print the dataset card and the recommended kind of learning."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from robopolicy.cli.options import check_numbers

HELP = "describe a dataset and recommend a kind of learning"
DESCRIPTION = (
    "Print the card of a dataset: episodes, features, success and return with intervals, trajectory quality (TQ) and "
    "state-action coverage (SACo), warnings, and whether imitation or offline RL is recommended."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the action."""
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="dataset of any format, or mapping file")
    text = "mean return of random actions, or a dataset of them; for TQ"
    parser.add_argument("--random", metavar="RETURN", help=text)
    parser.add_argument("--best", metavar="RETURN", help="mean return of the best online policy, or a dataset; for TQ")
    parser.add_argument("--replay", type=Path, metavar="DATASET", help="replay dataset of the online learner; for SACo")
    parser.add_argument("--bins", type=int, default=100, help="bins per axis for SACo; 0: exact values (default: 100)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the dataset card; return 0."""
    from robopolicy.data.formats import camera_shapes, read_dataset
    from robopolicy.errors import UserError
    from robopolicy.evaluation.dataset_card import ADVICE, References, dataset_card
    from robopolicy.evaluation.report import aligned

    check_numbers(args, positive=(), non_negative=("bins",))
    if (args.random is None) != (args.best is None):
        raise UserError("Trajectory quality requires both --random and --best.")
    episodes = read_dataset(args.dataset, images=False)
    replay = read_dataset(args.replay, images=False) if args.replay else None
    references = References(_return("--random", args.random), _return("--best", args.best), replay)
    card = dataset_card(episodes, references, bins=args.bins, cameras=camera_shapes(args.dataset))
    if args.json:
        print(json.dumps({"dataset": str(args.dataset), **card.to_dict()}))
        return 0
    _, facts = card.facts()
    width = max(len(name) for name, _ in facts)
    print(f"{args.dataset}")
    for name, value in facts:
        print(f"  {name:<{width}}  {value}")
    print(aligned(*card.table()))
    for warning in card.warnings:
        print(f"warning: {warning}")
    print(f"learn with: {ADVICE[card.advice]}")
    return 0


def _return(option: str, text: str | None) -> float | None:
    """Parse a number, or compute the mean return of the dataset at that path."""
    import math

    from robopolicy.data.formats import read_dataset
    from robopolicy.data.quality import returns_of
    from robopolicy.errors import UserError

    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is not None:
        if not math.isfinite(number):
            raise UserError(f"{option} must be a finite return or a dataset, got {text}.")
        return number
    returns = returns_of(read_dataset(text, images=False).without_closing_frames())
    if returns is None:
        raise UserError(f"{option} requires a return, and {text} has no rewards.")
    return float(returns.mean())
