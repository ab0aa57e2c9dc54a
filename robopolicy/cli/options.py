"""Common command-line options, without expensive imports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from robopolicy.constraints import check_count
from robopolicy.errors import UserError
from robopolicy.torchrun import process_count

if TYPE_CHECKING:
    from robopolicy.training.loop import Report, Trainer

EVALUATION_SEED = 50_000  # first episode of evaluations; training selects checkpoints on seeds from 10000


def add_rollout_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `eval` and `play`."""
    parser.add_argument("--task", help="task id (default: the task of the checkpoint)")
    text = f"seed of the first episode (default: {EVALUATION_SEED}; training evaluates its checkpoints from 10000)"
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help=text)
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER[,FOLDER] (default: its own)")
    add_judge_option(parser)
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--stochastic", action="store_true", help="act with exploration noise")
    parser.add_argument(
        "--device", default="auto", help="device of policies and GPU physics (default: the GPU, if any)"
    )
    parser.add_argument("--camera", help="camera of the video (default: the task's own)")
    text = "world model that scores candidate chunks; the best one is executed (default: none)"
    parser.add_argument("--plan-with", default="", metavar="FOLDER[,FOLDER]", help=text)
    parser.add_argument("--candidates", type=int, default=8, help="candidate chunks with --plan-with (default: 8)")
    parser.add_argument("--plan-horizon", type=int, default=1, help="decisions predicted with --plan-with (default: 1)")
    text = "cross-entropy refinement rounds with --plan-with (default: 0)"
    parser.add_argument("--rounds", type=int, default=0, help=text)


def add_code_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that permit code in checkpoints, also to subcommands."""
    if subparsers := [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]:
        for subcommand in subparsers[0].choices.values():
            add_code_options(subcommand)
        return
    text = "load checkpoints that contain programs, which run confined (default: refuse them)"
    parser.add_argument("--allow-code", action="store_true", help=text)
    text = "run programs of a model even where this machine cannot confine them (see 'robopolicy doctor')"
    parser.add_argument("--unsafe-code", action="store_true", help=text)


def add_judge_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the success detector of a world model."""
    text = "judge of a world model: folder of 'worldmodel judge', vlm:MODEL@URL or vlm:FOLDER (default: its own)"
    parser.add_argument("--judge", default="", help=text)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that search for a checkpoint and evaluate it on held-out episodes."""
    text = "held-out episodes of the report (default: 100)"
    parser.add_argument("--report-episodes", type=int, default=100, help=text)
    text = "first seed of the held-out episodes (default: 30000)"
    parser.add_argument("--report-seed", type=int, default=30_000, help=text)
    parser.add_argument("--resume", action="store_true", help="resume the search in the folder of --out")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER (default: the task's own)")
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument(
        "--device", default="auto", help="device of policies and GPU physics (default: the GPU, if any)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_model_options(parser: argparse.ArgumentParser, data: str, data_help: str, example: str) -> None:
    """Add the options of commands that train a model other than a policy.

    `data` is the placeholder of the dataset with help `data_help`; `example` is a setting.
    """
    parser.add_argument("dataset", nargs="?", default="", metavar=data, help=data_help)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume this run from its last resume point")
    text = f"overrides of settings, e.g. {example}"
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--device", default="auto", help="device (default: the GPU, if any)")
    parser.add_argument("--out", default="runs", help="parent folder (default: runs)")
    parser.add_argument("--name", default="", help="run folder (default: composed)")


def train_model(
    args: argparse.Namespace, start: Callable[[dict[str, object]], Trainer], resume: Callable[[Path], Trainer]
) -> tuple[int, Report | None]:
    """Train a model other than a policy and print its folder.

    Args:
        args: Options of `add_model_options`.
        start: Function that creates a new run from the options.
        resume: Function that resumes the run in a folder.

    Returns:
        Exit code, and the report of a run that has ended.
    """
    from robopolicy.shutdown import Interrupted
    from robopolicy.training.distributed import processes

    if args.resume is not None and (args.dataset or args.override):
        raise UserError("A resumed run keeps its settings; pass only --resume RUN.")
    fields = {name: getattr(args, name) for name in ("dataset", "seed", "device", "out", "name")}
    with processes():
        trainer = start(fields) if args.resume is None else resume(args.resume)
        try:
            report = trainer.train()
        except Interrupted as stop:
            if trainer.writes:
                print(f"Stopped; resume with: robopolicy {args.command_name} train --resume {stop.folder}")
            return stop.exit_code, None
    if not trainer.writes:
        return 0, None
    print(describe_end(trainer, report))
    return 0, report


def describe_end(trainer: Trainer, report: Report) -> str:
    """Format the duration and the files of a finished run."""
    *others, last = ["report.json", *trainer.saved_checkpoints()]
    return f"Done in {report['seconds']:.0f} s: {trainer.folder}/{', '.join(others)} and {last}."


def check_single_process(what: str) -> None:
    """Raise a UserError if `what` runs under `torchrun`, since every process would repeat it."""
    if process_count() > 1:
        raise UserError(f"torchrun distributes one training run; call 'robopolicy {what}' without it.")


def check_numbers(args: argparse.Namespace, *, positive: Sequence[str], non_negative: Sequence[str]) -> None:
    """Raise a UserError that names the option of a number out of range."""
    for least, names in ((1, positive), (0, non_negative)):
        for name in names:
            check_count(f"--{name.replace('_', '-')}", getattr(args, name), least)


def renames(texts: Sequence[str]) -> dict[str, str]:
    """Read the values KEY=NAME of `--rename`; anything else raises a UserError."""
    pairs = [text.partition("=") for text in texts]
    for text, (key, _, name) in zip(texts, pairs, strict=True):
        if not key or not name:
            raise UserError(f"--rename takes KEY=NAME, e.g. state=obs, found '{text}'.")
    return {key: name for key, _, name in pairs}


def reject_unused(args: argparse.Namespace, why: str, *options: str) -> None:
    """Raise a UserError if one of the `options` was passed; `why` is the reason for the message ("without --video")."""
    for option in options:
        if option in args.given:
            raise UserError(f"{option} has no effect {why}; leave it out.")


def check_overwrite(args: argparse.Namespace, *outputs: str) -> None:
    """Raise a UserError for `--overwrite` without one of the `outputs` options."""
    if not args.given & set(outputs):
        reject_unused(args, f"without {' or '.join(outputs)}", "--overwrite")


def check_resume(args: argparse.Namespace, *options: str) -> None:
    """Raise a UserError if `--resume` of a model's run is combined with its settings, to which `options` are added."""
    if args.resume is not None:
        fixed = ("--seed", "--device", "--out", "--name", *options)
        reject_unused(args, "with --resume, which keeps the settings", *fixed)


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    """Add `--overwrite`."""
    parser.add_argument("--overwrite", action="store_true", help="replace existing output of the same kind")


def check_search(out: Path, record: str, *, resume: bool, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Raise a UserError if the output folder of a search can neither be resumed nor replaced.

    Args:
        out: Folder of the new checkpoint.
        record: File name of the search log in the folder.
        resume: Resume an existing search.
        overwrite: Replace an existing checkpoint or search.
        sources: Parent checkpoints, which are never replaced.
    """
    from robopolicy.files import check_new_folder
    from robopolicy.training.manifest import MANIFEST

    has_log = (out / record).is_file()
    if resume:
        if overwrite:
            raise UserError("--resume continues and --overwrite restarts; pass only one of them.")
        if not has_log:
            raise UserError(f"There is no search to resume in {out}; omit --resume.")
        return
    if has_log and not overwrite and not (out / MANIFEST).is_file():
        raise UserError(f"The search in {out} was interrupted; continue with --resume or restart with --overwrite.")
    check_new_folder(out, "a checkpoint", MANIFEST, record, overwrite=overwrite, sources=sources)
