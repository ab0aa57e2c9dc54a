"""What a run says on the terminal: a live progress bar on a TTY, one plain line per interval anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from robopolicy.evaluation.intervals import PairedDifference

# Metrics worth a place on the terminal, where they exist, and their short names there.
HEADLINES = {
    "train/env_steps": "steps",
    "rollout/success": "success",
    "rollout/return": "return",
    "rollout/diverged": "diverged",
    "actor/loss": "loss",
    "critic/loss": "critic",
    "actor/approx_kl": "kl",
}
UNUSUAL = ("steps", "diverged")  # not worth a word where they are 0


class RunConsole:
    """Progress of one run."""

    def __init__(self, name: str, total: int, done: int = 0, console: Console | None = None) -> None:
        """Start the display; `done` updates came before a resume."""
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._name, self._total, self._first = name, total, done
        self.earlier = 0.0  # seconds spent before a resume
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
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=update)

    def row(self, update: int, row: Mapping[str, float]) -> None:
        """Show the headline numbers of a logged row."""
        shown = {
            label: row[key] for key, label in HEADLINES.items() if key in row and (row[key] or label not in UNUSUAL)
        }
        text = "  ".join(f"{label} {value:{',.0f' if label == 'steps' else '.3g'}}" for label, value in shown.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=update, row=text)
            return
        elapsed = time.monotonic() - self._start
        left = elapsed / max(update - self._first, 1) * (self._total - update)
        times = f"{self.earlier + elapsed:.0f} s, {left:.0f} s left"
        self.note(f"{self._name}  update {update}/{self._total}  {text}  {times}")

    def note(self, text: str) -> None:
        """Print one line, unless the terminal is gone."""
        with suppress(OSError):
            self._console.print(text, markup=False)

    def close(self) -> None:
        """Stop the display."""
        if self._progress is not None:
            with suppress(OSError):
                self._progress.stop()


def describe_evaluation(summary: Mapping[str, Any]) -> str:
    """One phrase for an evaluation: success with its interval, or the return."""
    count = f"{summary['n']} episode{'' if summary['n'] == 1 else 's'}"
    if lost := summary.get("diverged", 0):
        count += f", of which {lost} ended because the simulation diverged"
    if summary["success"] is None:
        return f"return {summary['return_mean']:.4g} over {count}"
    low, high = summary["low"], summary["high"]
    return f"success {summary['success']:.1%} [{low:.1%}, {high:.1%}] over {count}"


def describe_duel(outcome: PairedDifference, base: Mapping[str, Any], kept: bool) -> str:
    """One phrase for the best policy of a run beside the base in fresh episodes, and which of them is kept."""
    gap = outcome.difference
    what, scale, unit = ("return", 1, "") if base["success"] is None else ("success", 100, " points")
    size, low, high = (f"{scale * value:+.3g}" for value in (gap.estimate, gap.low, gap.high))
    verdict = "below its base, which checkpoints/best now holds" if kept else "best against base"
    return f"{verdict}: {what} {size}{unit} [{low}, {high}] over {gap.n} fresh episodes"
