"""What a run looks like while it goes on: a table on a terminal, lines anywhere else."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from real_robot.robot import RobotSpec
from real_robot.states import State, Tick

REFRESH = 4  # pictures a second; each costs the control loop some milliseconds of the interpreter
SWITCH = 0.0005  # [s] after which the interpreter lets the control loop interrupt the drawing
COLOURS = {State.RUN: "green", State.ARMED: "cyan", State.HOLD: "yellow", State.ESTOP: "bold red"}


class View:
    """Remembers the newest tick; a terminal draws it, other outputs get a line for every change of state."""

    def __init__(self, console: Console, robot: RobotSpec, task: str, *, lines: bool) -> None:
        self._console, self._lines = console, lines
        self._title, self._robot = f"{robot.name}, {task}", robot
        self._status: Mapping[str, Any] = {}
        self._moments: deque[float] = deque(maxlen=100)
        self._said = ""
        self._played: list[str] = []

    def update(self, status: Mapping[str, Any], tick: Tick) -> None:
        """A tick is over."""
        self._status = status
        self._moments.append(tick.now)
        state = str(tick.state) + (f" ({tick.reason})" if tick.reason else "")
        if self._lines and state != self._said:
            self._line(f"{self._title}: {state}")
        self._said = state

    def finished(self, played: Any, number: int, of: int) -> None:
        """An episode is over."""
        outcome = {True: "success", False: "failure", None: played.state}[played.success if played.done else None]
        seed = "" if played.seed is None else f", seed {played.seed}"
        text = f"episode {number} of {of}{seed}: {outcome}, {played.steps} steps, {played.ticks} ticks"
        self._played = [*self._played[-4:], text]
        if self._lines:
            self._line(text)

    def closing(self, figures: Mapping[str, Any], report: Path) -> None:
        """All is over."""
        if figures["n"]:
            share = " ".join(f"{100 * figures[key]:.1f}" for key in ("success", "low", "high")).split()
            self._line(f"success {share[0]} % [{share[1]}, {share[2]}] of {figures['n']} episodes")
        p50, p99 = figures["period_p50_ms"], figures["period_p99_ms"]
        period = "" if p50 is None or figures["lockstep"] else f", period p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        kinds = ", ".join(f"{count} {kind}" for kind, count in figures["interventions"].items()) or "none"
        misses = f"{figures['deadline_misses']} deadline misses"
        self._line(f"{figures['ticks']} ticks{period}, {misses}; interventions: {kinds}")
        self._line(f"report: {report}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __rich__(self) -> Group:
        status, table = self._status, Table.grid(padding=(0, 2))
        state = status.get("state", "")
        heading = Text(f"{self._title}   ").append(f"{state} {status.get('reason', '')}", COLOURS.get(state, ""))
        periods = np.diff(self._moments) if len(self._moments) > 2 else np.array([np.nan])
        rate = 1.0 / periods.mean() if periods.mean() > 0 else 0.0
        table.add_row("rate", f"{rate:6.1f} of {self._robot.rate:g} Hz", f"{status.get('overruns', 0)} missed")
        table.add_row("inference", f"{1e3 * status.get('latency', 0.0):6.1f} ms", "p95")
        table.add_row("chunk", f"{1e3 * status.get('remaining', 0.0):6.0f} ms", "left to play")
        done = status.get("interventions", {})
        table.add_row("interventions", f"{sum(done.values()):6d}", ", ".join(f"{k} {n}" for k, n in done.items()))
        for key, age in status.get("ages", {}).items():
            limit = self._robot.deadline(key)
            bar = ProgressBar(total=limit, completed=min(age if age is not None else limit, limit), width=24)
            table.add_row(f"age of {key}", "   -" if age is None else f"{1e3 * age:6.1f} ms", bar)
        return Group(heading, table, *(Text(text, "dim") for text in self._played))


@contextmanager
def open_view(plain: bool, robot: RobotSpec, task: str) -> Iterator[View]:
    """The view of a run: a live table on a terminal unless `plain`, else lines."""
    console = Console()
    view = View(console, robot, task, lines=plain or not console.is_terminal)
    if plain or not console.is_terminal:
        yield view
        return
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        with Live(view, console=console, refresh_per_second=REFRESH):
            yield view
    finally:
        sys.setswitchinterval(before)
