"""Implement `robopolicy tune_juggler`, which tunes the settings of the scripted juggler with one agent per group."""

from __future__ import annotations

import argparse
import json
from typing import Any

from robopolicy.cli.options import check_numbers

EXAMPLES = """\
examples:
  robopolicy tune_juggler
  robopolicy tune_juggler --task volley/bump --rounds 20
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "tune_juggler",
        description="Tune eight settings of the scripted juggler, with one agent per group of settings and a shared "
        "score, and compare them with the default settings on held-out episodes.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--task", default="volley/pass", help="volleyball drill (default: volley/pass)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of trials (default: 12)")
    parser.add_argument("--trials", type=int, default=8, help="trials per round (default: 8)")
    parser.add_argument("--episodes", type=int, default=16, help="episodes per trial (default: 16)")
    parser.add_argument("--steps", type=int, default=500, help="maximum control steps of an episode (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode and of the agents (default: 0)")
    parser.add_argument("--held-out", type=int, default=100, help="episodes of the comparison (default: 100)")
    parser.add_argument("--out", default="runs/tune_juggler", help="folder for style.json (default: runs/tune_juggler)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Tune, save and compare the settings."""
    from robopolicy.contrib.drone_volleyball.tune_juggler import Config, tune

    check_numbers(args, positive=("rounds", "trials", "episodes", "steps", "held_out"), non_negative=("seed",))
    names = ("task", "rounds", "trials", "episodes", "steps", "seed", "held_out", "out")
    config = Config(**{name: getattr(args, name) for name in names})
    before, after = tune(config, (lambda line: None) if args.json else print)
    if args.json:
        print(json.dumps({"out": f"{args.out}/style.json", "by_hand": before, "tuned": after}))
    return 0
