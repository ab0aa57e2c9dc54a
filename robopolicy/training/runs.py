"""New and resumed runs: their folders, locks and trainers."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from robopolicy.atomic import create_text, restore_partial
from robopolicy.core.distributed import all_reduce_max, rank
from robopolicy.errors import UserError, cannot_write
from robopolicy.files import check_writable
from robopolicy.training import guards
from robopolicy.training.build import build, resolve_config
from robopolicy.training.checkpoint import load_training_state
from robopolicy.training.compose import config_file, config_text, read_config
from robopolicy.training.config import TrainConfig
from robopolicy.training.distributed import check_distributed
from robopolicy.training.loop import Trainer
from robopolicy.training.resume import check_resume_point, lock_run, restore, run_exists_error


def start_run(config: TrainConfig) -> Trainer:
    """Prepare a new run in `config.out / config.name`.

    Raises:
        UserError: The configuration is invalid, or the folder is not empty or cannot be written.
    """
    config = resolve_config(config)
    folder = Path(config.out) / config.name
    if rank() > 0:  # process 0 makes the folder
        return Trainer(build(config), folder)
    if folder.exists() and any(folder.iterdir()):
        raise run_exists_error(folder)
    check_writable(folder)
    parts = build(config)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        create_text(folder / "config.yaml", config_text(config))
    except OSError as error:
        parts.close()
        if (folder / "config.yaml").exists():  # another process created it first
            raise run_exists_error(folder) from error
        shutil.rmtree(folder, ignore_errors=True)
        raise cannot_write(folder, error) from error
    try:
        trainer = Trainer(parts, folder)
        trainer.is_new = True
        return trainer
    except (OSError, UserError) as error:
        parts.close()
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise cannot_write(folder, error) from error
        raise


def resume_run(folder: Path) -> Trainer:
    """Prepare to resume a run from its last resume point.

    Raises:
        UserError: The folder is not a run, or the run has ended or does not support several processes.
    """
    config = read_config(config_file(folder))
    if (folder / "report.json").exists():
        raise UserError(f"Run {folder} has ended; start a new one with init_from={folder}/checkpoints/last.")
    check_distributed(config)
    with ExitStack() as stack:
        lock = stack.enter_context(lock_run(folder)) if rank() == 0 else None  # another process may be writing
        trainer = _resume(config, folder, lock)
        stack.pop_all()
    return trainer


def _resume(config: TrainConfig, folder: Path, lock: IO[str] | None) -> Trainer:
    """Resume a run that `lock` protects."""
    last = folder / "checkpoints" / "last"
    if rank() == 0:
        restore_partial(last)
    all_reduce_max(0)  # the other processes read afterwards
    if not last.exists():
        # The run was killed before its first resume point. It depends only on its configuration, so it restarts.
        trainer = Trainer(build(config), folder, lock=lock)
        trainer.console.note(f"{last} does not exist, so the run restarts at its first update.")
        return trainer
    state = load_training_state(last)
    check_resume_point(state, last, "best")
    if rank() == 0:
        guards.restore_backup(folder / "checkpoints" / "best", state["best"])
    trainer = Trainer(build(config, start=last), folder, resume_at=int(state["update"]), lock=lock)
    restore(trainer, state)
    return trainer
