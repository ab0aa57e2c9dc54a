"""Options that were passed, whatever their value: those that would have no effect are refused."""

from __future__ import annotations

import argparse

from robopolicy.errors import UserError


def check_idle(args: argparse.Namespace, why: str, *options: str) -> None:
    """Refuse options that would have no effect.

    Args:
        args: As parsed by `cli.main`.
        why: What is missing or in the way ("without --latency").
        options: Their names.

    Raises:
        UserError: One of them was passed.
    """
    for option in options:
        if option in args.given:
            raise UserError(f"{option} has no effect {why}; leave it out.")


def check_overwrite(args: argparse.Namespace, *places: str) -> None:
    """Refuse `--overwrite` where no place was named, so that a free one is taken or nothing is written.

    Raises:
        UserError: It was passed alone.
    """
    if not args.given & set(places):
        check_idle(args, f"without {' or '.join(places)}", "--overwrite")


def check_resume(args: argparse.Namespace, *options: str) -> None:
    """Refuse settings of a model's training run that goes on with those it began with.

    Args:
        args: As parsed with `options.add_model_options`.
        options: Settings besides those.

    Raises:
        UserError: One of them was passed with `--resume`.
    """
    if args.resume is not None:
        check_idle(args, "with --resume, which keeps the settings", "--seed", "--device", "--out", "--name", *options)
