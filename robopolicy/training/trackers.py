"""Experiment trackers of a run: TensorBoard, Weights & Biases and Trackio.

They get copies of the rows of `metrics.jsonl`, which remains the record. An error of a tracker does not stop a run.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from uuid import uuid4

from robopolicy.atomic import write_text
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.schema import to_dict
from robopolicy.training.config import TrainConfig
from robopolicy.training.loggers import Logger, Row

log = logging.getLogger(__name__)


class TensorBoardLogger:
    """TensorBoard event files under `folder`."""

    def __init__(self, folder: Path, resume_at: int = 0) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_at + 1 if resume_at else 0)

    def log(self, update: int, row: Row) -> None:
        """Write every scalar under its own tag."""
        for key, value in row.items():
            self._writer.add_scalar(key, value, update)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger:
    """Weights & Biases; offline unless WANDB_MODE is set, so that a run requires no login or network."""

    def __init__(self, folder: Path, *, project: str, name: str, identifier: str, config: Mapping[str, Any]) -> None:
        self._run = require("wandb", "wandb").init(
            dir=str(folder),
            project=project,
            name=name,
            id=identifier,
            resume="allow",
            config=dict(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, update: int, row: Row) -> None:
        """Log the row at its update."""
        self._run.log(dict(row), step=update)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioLogger:
    """Trackio; in the local database in TRACKIO_DIR unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names a server.

    A resumed run continues the newest run of its name, so names are unique.
    """

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any], resume_at: int = 0) -> None:
        self._trackio = require("trackio", "trackio")
        with redirect_stdout(io.StringIO()):  # its greeting
            self._trackio.init(
                project=project,
                name=name,
                config=dict(config),
                resume="allow" if resume_at else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, update: int, row: Row) -> None:
        """Log the row at its update."""
        self._trackio.log(dict(row), step=update)

    def close(self) -> None:
        """Write the remaining rows and finish the run."""
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


class SafeLogger:
    """Logger `name` made by `make`, which is dropped with one warning when it raises an exception.

    Raises:
        UserError: By `make`, such as for a missing package.
    """

    def __init__(self, name: str, make: Callable[[], Logger]) -> None:
        self._name = name
        self._logger: Logger | None = None

        def start() -> None:
            self._logger = make()

        self._attempt(start)

    def log(self, update: int, row: Row) -> None:
        """Log the row, unless the logger was dropped."""
        if self._logger is not None:
            self._attempt(lambda logger=self._logger: logger.log(update, row))

    def close(self) -> None:
        """Close the logger, unless it was dropped."""
        if self._logger is not None:
            self._attempt(self._logger.close)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except UserError:
            raise
        except Exception as error:  # of a foreign package: anything
            self._logger = None
            text = str(error).strip().splitlines()
            reason = text[0] if text else type(error).__name__
            log.warning("%s failed and gets no further rows; the run continues: %s", self._name, reason)


def run_identifier(folder: Path) -> str:
    """Identifier of the run in `folder`, created once: several runs of a project may have the same name."""
    file = folder / "tracker_id"
    if not file.is_file():
        write_text(file, uuid4().hex[:8] + "\n")
    return file.read_text(encoding="utf-8").strip()


def make_trackers(config: TrainConfig, folder: Path, resume_at: int) -> list[Logger]:
    """Create the trackers that `config.logging` selects."""
    chosen = config.logging
    name, run = config.name, {"project": chosen.project, "config": to_dict(config)}

    def wandb() -> Logger:
        return WandbLogger(folder, name=name, identifier=run_identifier(folder), **run)

    def trackio() -> Logger:
        return TrackioLogger(name=f"{name}-{run_identifier(folder)}", **run, resume_at=resume_at)

    rows: tuple[tuple[bool, str, Callable[[], Logger]], ...] = (
        (chosen.tensorboard, "TensorBoard", lambda: TensorBoardLogger(folder / "tensorboard", resume_at)),
        (chosen.wandb, "Weights & Biases", wandb),
        (chosen.trackio, "Trackio", trackio),
    )
    return [SafeLogger(name, make) for selected, name, make in rows if selected]
