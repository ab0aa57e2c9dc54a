"""Command-line options that several commands share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from robopolicy.constraints import check_count
from robopolicy.errors import UserError

if TYPE_CHECKING:
    from robopolicy.training.loop import Report, Trainer


def add_rollout_options(parser: argparse.ArgumentParser) -> None:
    """Options of `eval` and `play`."""
    parser.add_argument("--task", help="task id (default: the one the checkpoint was trained on)")
    text = "seed of the first episode (default: 50000; training evaluates its checkpoints on seeds from 10000)"
    parser.add_argument("--seed", type=int, default=50_000, help=text)
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER[,FOLDER] (default: its own)")
    add_judge_option(parser)
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--stochastic", action="store_true", help="act with exploration noise")
    parser.add_argument("--device", default="cpu", help="device of policies and GPU physics (default: cpu)")
    parser.add_argument("--camera", help="camera of the video (default: the task's own)")
    text = "world model that scores candidate chunks; the best one is executed (default: none)"
    parser.add_argument("--plan-with", default="", metavar="FOLDER[,FOLDER]", help=text)
    parser.add_argument("--candidates", type=int, default=8, help="candidate chunks with --plan-with (default: 8)")
    parser.add_argument("--plan-horizon", type=int, default=1, help="decisions predicted with --plan-with (default: 1)")
    parser.add_argument(
        "--rounds", type=int, default=0, help="cross-entropy refinement rounds with --plan-with (default: 0)"
    )


def add_judge_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the success detector of a world model."""
    text = (
        "judge of a world model: folder of 'worldmodel judge', vlm:MODEL@URL or vlm:FOLDER (default: the model's own)"
    )
    parser.add_argument("--judge", default="", help=text)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that search for a checkpoint and evaluate it on held-out episodes."""
    parser.add_argument(
        "--report-episodes", type=int, default=100, help="held-out episodes of the report (default: 100)"
    )
    parser.add_argument(
        "--report-seed", type=int, default=30_000, help="first seed of the held-out episodes (default: 30000)"
    )
    parser.add_argument("--resume", action="store_true", help="resume the search in the folder of --out")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER (default: the task's own)")
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--device", default="cpu", help="device of policies and GPU physics (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_model_options(parser: argparse.ArgumentParser, data: str, data_help: str, example: str) -> None:
    """Options of commands that train a model other than a policy.

    Args:
        parser: Parser of the command.
        data: Placeholder of the dataset.
        data_help: What it is.
        example: Of a setting.
    """
    parser.add_argument("dataset", nargs="?", default="", metavar=data, help=data_help)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume this run from its last resume point")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="KEY=VALUE", help=f"overrides of settings, e.g. {example}"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--device", default="cpu", help="device (default: cpu)")
    parser.add_argument("--out", default="runs", help="parent folder (default: runs)")
    parser.add_argument("--name", default="", help="run folder (default: composed)")


def train_model(
    args: argparse.Namespace, start: Callable[[dict[str, object]], Trainer], resume: Callable[[Path], Trainer]
) -> tuple[int, Report | None]:
    """Train a model other than a policy and print where it is.

    Args:
        args: As parsed with `add_model_options`.
        start: Function that creates a new run from the options.
        resume: Function that resumes the run in a folder.

    Returns:
        Exit code, and the report of a run that came to its end.

    Raises:
        UserError: The run cannot be made.
    """
    from robopolicy.training.resume import Interrupted

    if args.resume is not None and (args.dataset or args.override):
        raise UserError("A resumed run keeps its settings; pass only --resume RUN.")
    fields = {name: getattr(args, name) for name in ("dataset", "seed", "device", "out", "name")}
    trainer = start(fields) if args.resume is None else resume(args.resume)
    try:
        report = trainer.train()
    except Interrupted as stop:
        print(f"Stopped; resume with: robopolicy {args.command_name} train --resume {stop.folder}")
        return stop.exit_code, None
    print(describe_end(trainer, report))
    return 0, report


def describe_end(trainer: Trainer, report: Report) -> str:
    """How long a run took, and what it left behind."""
    *others, last = ["report.json", *trainer.saved_checkpoints()]
    return f"Done in {report['seconds']:.0f} s: {trainer.folder}/{', '.join(others)} and {last}."


def check_alone(what: str) -> None:
    """Refuse `what` under `torchrun`, because every process would repeat it.

    Raises:
        UserError: There are several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"torchrun shares out one training run; call 'robopolicy {what}' without it.")


def check_numbers(args: argparse.Namespace, *, positive: Sequence[str], non_negative: Sequence[str]) -> None:
    """Refuse numbers out of range and name their option."""
    for least, names in ((1, positive), (0, non_negative)):
        for name in names:
            check_count(f"--{name.replace('_', '-')}", getattr(args, name), least)


def reject_unused(args: argparse.Namespace, why: str, *options: str) -> None:
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
    """Refuse `--overwrite` without an output option.

    Raises:
        UserError: It was passed alone.
    """
    if not args.given & set(places):
        reject_unused(args, f"without {' or '.join(places)}", "--overwrite")


def check_resume(args: argparse.Namespace, *options: str) -> None:
    """Refuse settings of a model's training run that goes on with those it began with.

    Args:
        args: As parsed with `options.add_model_options`.
        options: Settings besides those.

    Raises:
        UserError: One of them was passed with `--resume`.
    """
    if args.resume is not None:
        reject_unused(
            args, "with --resume, which keeps the settings", "--seed", "--device", "--out", "--name", *options
        )


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    """Add `--overwrite`."""
    parser.add_argument("--overwrite", action="store_true", help="replace existing output of the same kind")


def check_search(out: Path, record: str, *, resume: bool, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Refuse an output folder that can neither be resumed nor replaced.

    Args:
        out: Folder of the checkpoint to come.
        record: Name of the file in it that a search keeps.
        resume: Whether to resume an existing search.
        overwrite: Whether a checkpoint or a search may be replaced.
        sources: Checkpoints that it is made of.

    Raises:
        UserError: There is no search to resume, or the output exists.
    """
    from robopolicy.files import check_new_folder
    from robopolicy.training.manifest import MANIFEST

    begun = (out / record).is_file()
    if resume:
        if overwrite:
            raise UserError("--resume continues and --overwrite starts again; pass only one of them.")
        if not begun:
            raise UserError(f"There is no search to resume in {out}; leave --resume out.")
        return
    if begun and not overwrite and not (out / MANIFEST).is_file():
        raise UserError(f"The search in {out} was interrupted; continue with --resume or start again with --overwrite.")
    check_new_folder(out, "a checkpoint", MANIFEST, record, overwrite=overwrite, sources=sources)
