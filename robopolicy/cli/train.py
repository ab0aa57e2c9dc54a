"""`robopolicy train`: train a policy by imitation or RL."""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import fill
from typing import Any

from robopolicy.cli.options import check_single_process, describe_end
from robopolicy.errors import UserError
from robopolicy.resources import preset_files, presets

EXAMPLES = """\
examples:
  robopolicy train experiment=few_demonstrations task=lift dataset=data/lift name=lift_flow_bc
  robopolicy train experiment=few_demonstrations task=lift dataset=data/lift seed=1 algorithm.lr=3e-4
  robopolicy train experiment=fine_tune init_from=runs/lift_flow_bc/checkpoints/best name=lift_reinflow
  robopolicy train task=point_mass policy=gaussian algorithm=ppo task.reward=shaped budget.env_steps=200000
  robopolicy train experiment=from_scratch task=half_cheetah policy=squashed_gaussian algorithm=sac
  robopolicy train task=lift policy=squashed_gaussian algorithm=rlpd dataset=data/lift budget.env_steps=100000
  robopolicy train algorithm=iql dataset=data/lift budget.updates=50000 replay.offline_updates=50000
  robopolicy train --resume runs/lift_reinflow
  robopolicy train --print-config experiment=fine_tune
  torchrun --nproc-per-node 2 -m robopolicy train experiment=from_scratch task=half_cheetah guards.restore_best=false
  robopolicy train --multirun experiment=from_scratch task=half_cheetah algorithm=ppo,bpo 'seed=range(0,3)'
  robopolicy train --multirun experiment=from_scratch task=half_cheetah algorithm.lr=1e-4,3e-4 hydra/launcher=joblib
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        description="Train a policy. SETTINGS are group=preset and key=value; --print-config prints them all.",
        epilog=EXAMPLES + _presets(),
    )
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="group=preset or key=value")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="resume this run folder from its last resume point")
    text = (
        "train every combination of key=a,b,c, through hydra/launcher=basic, joblib, submitit_local, "
        "submitit_slurm or ray; finished runs are kept and interrupted ones resume"
    )
    parser.add_argument("--multirun", action="store_true", help=text)
    parser.add_argument("--print-config", action="store_true", help="print the composed configuration and exit")


def run(args: argparse.Namespace) -> int:
    """Train; return 0 at the end of the budget, 130 after Ctrl-C."""
    if args.resume is None and not args.settings and not args.print_config:
        raise UserError(
            "No settings are given; pass e.g. experiment=few_demonstrations task=lift dataset=FOLDER, or see "
            "'robopolicy train --help'."
        )
    if args.resume is not None and args.settings:
        raise UserError("A resumed run keeps its settings; drop them, or start a new run with init_from=CHECKPOINT.")
    if args.resume is not None and args.multirun:
        raise UserError("Repeat the command of the sweep to continue it; --resume continues one run.")
    if args.multirun:
        check_single_process("train --multirun")
    from robopolicy.training.names import check_sweep, read_settings

    check_names = check_sweep if args.multirun else read_settings
    check_names(args.settings)  # before the slow import of torch
    if args.multirun:
        return _multirun(args)
    from robopolicy.training.compose import compose_config, config_file, config_text, read_config

    if args.print_config:
        config = compose_config(args.settings) if args.resume is None else read_config(config_file(args.resume))
        print(config_text(config), end="")
        return 0
    from robopolicy.shutdown import Interrupted
    from robopolicy.training.distributed import processes
    from robopolicy.training.runs import resume_run, start_run

    with processes():
        trainer = resume_run(args.resume) if args.resume is not None else start_run(compose_config(args.settings))
        try:
            report = trainer.train()
        except Interrupted as stop:
            if trainer.writes:
                print(stop)
            return stop.exit_code
    if trainer.writes:
        print(describe_end(trainer, report))
    return 0


def _multirun(args: argparse.Namespace) -> int:
    """Train a sweep, or print its runs."""
    from robopolicy.cli.progress import hint_when_stopped
    from robopolicy.training.many_runs import combinations, launch

    configs, launcher = combinations(args.settings)
    if args.print_config:
        print("\n".join(f"{config.out}/{config.name}" for config in configs))
        return 0
    with hint_when_stopped(lambda: "Stopped; run the same command again to continue."):
        folders = launch(configs, launcher)
    for run in folders:
        print(f"Done: {run}")
    return 0


def _presets() -> str:
    """Return the names of the presets, read from the file names to keep `--help` fast."""
    groups = sorted({path.name for place in presets() for path in place.iterdir() if path.is_dir()} - {"text"})
    lines = [f"{group}: {', '.join(names)}" for group in groups if (names := preset_files(group))]
    lines.append("algorithm.recipe: see 'robopolicy list recipes'")
    return "presets:\n" + "".join(f"{_wrapped(line)}\n" for line in lines)


def _wrapped(line: str) -> str:
    return fill(line, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
