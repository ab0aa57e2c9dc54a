"""Metrics of a run in JSON lines and CSV, and on the terminal.

One row per logged update, keyed by `update`. A resumed run first drops the rows written after its last resume point, so
an uninterrupted run writes the same files.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from robopolicy.atomic import atomic_file, write_text
from robopolicy.errors import UserError, cannot_write
from robopolicy.evaluation.intervals import PairedDifference
from robopolicy.files import parse_json
from robopolicy.plurals import counted

Row = Mapping[str, float | int]


class Logger(Protocol):
    """Interface of loggers of scalars."""

    def log(self, update: int, row: Row) -> None:
        """Write the scalars of one update."""
        ...

    def close(self) -> None:
        """Flush and release resources."""
        ...


class JsonlLogger:
    """One JSON object per row."""

    def __init__(self, file: Path, resume_at: int = 0) -> None:
        """Append to `file` after its rows up to update `resume_at`; a run from the start keeps no rows."""
        rows = read_jsonl(file) if file.exists() else []
        kept = [row for row in rows if row["update"] <= resume_at > 0]
        write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
        self._stream = file.open("a", encoding="utf-8")

    def log(self, update: int, row: Row) -> None:
        """Append and flush a line, so that nothing is lost when the process dies."""
        try:
            self._stream.write(json.dumps({"update": update, **row}) + "\n")
            self._stream.flush()
        except OSError as error:
            raise cannot_write(Path(self._stream.name), error) from error

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class CsvLogger:
    """CSV table; a row with a new column rewrites the file with that column."""

    def __init__(self, file: Path, resume_at: int = 0) -> None:
        """Append to `file` after its rows up to update `resume_at`."""
        self._file = file
        self._rows: list[dict[str, Any]] = []
        if file.exists():
            # A killed process may leave a partial row without a number.
            rows = [row for row in csv.DictReader(_lines(file)) if (row.get("update") or "").isdecimal()]
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
        """Do nothing; the file is closed after every row."""

    def _rewrite(self) -> None:
        with atomic_file(self._file) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file, each with the number of its update; an incomplete last line is dropped.

    Raises:
        UserError: Another line is no row.
    """
    rows: list[dict[str, Any]] = []
    lines = _lines(file)
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{file} line {number} is not JSON; repair or remove the line.") from error
        if not isinstance(row, dict) or type(row.get("update")) is not int:
            raise UserError(f"{file} line {number} has no number 'update'; repair or remove the line.")
        rows.append(row)
    return rows


def _lines(file: Path) -> list[str]:
    """Lines of a text file; damaged text raises a UserError."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is damaged ({error.reason}); remove it to resume without its rows.") from error


def make_loggers(folder: Path, resume_at: int) -> list[Logger]:
    """Create the loggers of every run, which drop the rows after update `resume_at`."""
    return [JsonlLogger(folder / "metrics.jsonl", resume_at), CsvLogger(folder / "metrics.csv", resume_at)]


# Metrics on the terminal and their short names.
HEADLINES = {
    "train/env_steps": "steps",
    "rollout/success": "success",
    "rollout/return": "return",
    "rollout/diverged": "diverged",
    "actor/loss": "loss",
    "critic/loss": "critic",
    "actor/approx_kl": "kl",
}
HIDDEN_IF_ZERO = ("steps", "diverged")


class RunConsole:
    """Progress display of one run."""

    def __init__(self, name: str, total: int, done: int = 0, console: Console | None = None) -> None:
        """Start the display after `done` updates of a resumed run."""
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._name, self._total, self._first = name, total, done
        self.seconds_before = 0.0  # seconds spent before a resume
        self._start = time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = ("[bold]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            texts = [TextColumn(column) if isinstance(column, str) else column for column in columns]
            self._progress = Progress(
                *texts, TimeRemainingColumn(), TextColumn("{task.fields[row]}"), console=self._console
            )
            self._task = self._progress.add_task(name, total=total, completed=done, row="")
            self._progress.start()

    def advance(self, update: int) -> None:
        """Update the progress bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=update)

    def row(self, update: int, row: Mapping[str, float]) -> None:
        """Print the headline metrics of a logged row."""
        values = {label: row[key] for key, label in HEADLINES.items() if key in row}
        values = {label: value for label, value in values.items() if value or label not in HIDDEN_IF_ZERO}
        text = "  ".join(f"{label} {value:{',.0f' if label == 'steps' else '.3g'}}" for label, value in values.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=update, row=text)
            return
        elapsed = time.monotonic() - self._start
        left = elapsed / max(update - self._first, 1) * (self._total - update)
        times = f"{self.seconds_before + elapsed:.0f} s, {left:.0f} s left"
        self.note(f"{self._name}  update {update}/{self._total}  {text}  {times}")

    def note(self, text: str) -> None:
        """Print one line; a closed terminal is ignored."""
        with suppress(OSError):
            self._console.print(text, markup=False)

    def close(self) -> None:
        """Stop the display."""
        if self._progress is not None:
            with suppress(OSError):
                self._progress.stop()


def describe_evaluation(summary: Mapping[str, Any]) -> str:
    """Format an evaluation: success with its interval, the return, or the action error without a simulator."""
    count = counted(summary["n"], "episode")
    if diverged := summary.get("diverged", 0):
        count += f", of which {diverged} ended because the simulation diverged"
    if "action_error" in summary:
        return (
            f"action error {summary['action_error']:.3g} standard deviations over {count.replace(' ', ' held-out ', 1)}"
        )
    if summary["success"] is None:
        return f"return {summary['return_mean']:.4g} over {count}"
    low, high = summary["low"], summary["high"]
    return f"success {summary['success']:.1%} [{low:.1%}, {high:.1%}] over {count}"


def describe_vs_base(outcome: PairedDifference, base: Mapping[str, Any], reverted: bool) -> str:
    """Format the comparison of the best policy with the base on held-out episodes, and which of them is kept."""
    gap = outcome.difference
    what, scale, unit = ("return", 1, "") if base["success"] is None else ("success", 100, " points")
    size, low, high = (f"{scale * value:+.3g}" for value in (gap.estimate, gap.low, gap.high))
    verdict = "below its base, which checkpoints/best now contains" if reverted else "best vs base"
    return f"{verdict}: {what} {size}{unit} [{low}, {high}] over {gap.n} held-out episodes"
