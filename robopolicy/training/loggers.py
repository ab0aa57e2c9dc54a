"""Loggers: JSON lines and CSV always, TensorBoard and Weights & Biases on request.

One row per logged update, keyed by `update`. A resumed run first drops the rows that the interrupted one wrote after
its last resume point, so that the files look as if nothing had happened.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from robopolicy.errors import UserError
from robopolicy.files import atomic_file, parse_json, write_text
from robopolicy.schema import to_plain
from robopolicy.training.config import TrainConfig

Row = Mapping[str, float | int]


class Logger(Protocol):
    """Takes rows of scalars."""

    def log(self, update: int, row: Row) -> None:
        """Write the scalars of one update."""
        ...

    def close(self) -> None:
        """Flush and free."""
        ...


class JsonlLogger:
    """One JSON object per row."""

    def __init__(self, file: Path, resume_at: int = 0) -> None:
        """Append to `file`, keeping only its rows up to update `resume_at`."""
        rows = read_jsonl(file) if file.exists() else []
        kept = [row for row in rows if row["update"] <= resume_at > 0]  # what begins again writes all rows again
        write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
        self._stream = file.open("a", encoding="utf-8")

    def log(self, update: int, row: Row) -> None:
        """Append a line and flush it, so that nothing is lost when the process dies."""
        self._stream.write(json.dumps({"update": update, **row}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class CsvLogger:
    """A table; when a row brings a new column, the file is rewritten with that column added."""

    def __init__(self, file: Path, resume_at: int = 0) -> None:
        """Append to `file`, keeping only its rows up to update `resume_at`."""
        self._file = file
        self._rows: list[dict[str, Any]] = []
        if file.exists():
            with file.open(newline="", encoding="utf-8") as stream:
                # A killed process may leave half a row, which has no number or comes after the resume point.
                rows = [row for row in csv.DictReader(stream) if row.get("update", "").isdigit()]
            self._rows = [row for row in rows if int(row["update"]) <= resume_at > 0]
        self._columns = list(dict.fromkeys(["update", *(key for row in self._rows for key in row)]))
        self._rewrite()

    def log(self, update: int, row: Row) -> None:
        """Append a row."""
        entry = {"update": update, **row}
        self._rows.append(entry)
        new = [key for key in entry if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
        else:
            with self._file.open("a", newline="", encoding="utf-8") as stream:
                csv.DictWriter(stream, self._columns, restval="").writerow(entry)

    def close(self) -> None:
        """Nothing is held open."""

    def _rewrite(self) -> None:
        with atomic_file(self._file) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)


class TensorBoardLogger:
    """TensorBoard event files under `folder`."""

    def __init__(self, folder: Path, resume_at: int = 0) -> None:
        module = _optional("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=resume_at + 1 if resume_at else 0)

    def log(self, update: int, row: Row) -> None:
        """Write every scalar under its own tag."""
        for key, value in row.items():
            self._writer.add_scalar(key, value, update)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger:
    """Weights & Biases; offline unless WANDB_MODE says otherwise, so that no run waits for a login or a network."""

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        module = _optional("wandb", "wandb")
        self._run = module.init(
            dir=str(folder),
            project=project,
            name=name,
            id=name,
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


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut short by a killed process is dropped."""
    rows: list[dict[str, Any]] = []
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_json(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{file} line {number} is not JSON; repair or remove the line.") from error
    return rows


def _optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"Logging to {package} needs a package that is not installed; run: pip install 'robopolicy[{package}]'."
        ) from error


def make_loggers(config: TrainConfig, folder: Path, resume_at: int) -> list[Logger]:
    """The loggers of a run, which drop what was written after update `resume_at`."""
    loggers: list[Logger] = [
        JsonlLogger(folder / "metrics.jsonl", resume_at),
        CsvLogger(folder / "metrics.csv", resume_at),
    ]
    if config.logging.tensorboard:
        loggers.append(TensorBoardLogger(folder / "tensorboard", resume_at))
    if config.logging.wandb:
        settings = {"project": config.logging.project, "name": config.name, "config": to_plain(config)}
        loggers.append(WandbLogger(folder, **settings))
    return loggers
