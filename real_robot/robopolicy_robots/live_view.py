"""What a run looks like while it goes on: a table on a terminal, lines anywhere else, and a page in a browser."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from robopolicy_robots.browser_view import BrowserView
from robopolicy_robots.figures import Figures
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import Transport

REFRESH = 4  # pictures a second; each costs the control loop some milliseconds of the interpreter
SWITCH = 0.0005  # [s] after which the interpreter lets the control loop interrupt the drawing
COLOURS = {State.RUN: "green", State.ARMED: "cyan", State.HOLD: "yellow", State.ESTOP: "bold red"}


class View:
    """Shows the newest figures; a terminal draws them, other outputs get a line for every change of state."""

    def __init__(self, console: Console, figures: Figures, browser: BrowserView | None, *, lines: bool) -> None:
        self.figures, self.browser = figures, browser
        self._console, self._lines = console, lines
        self._title = f"{figures.robot.name}, {figures.task}"
        self._said = ""

    def update(self, status: Mapping[str, Any], tick: Tick) -> None:
        """A tick is over."""
        self.figures.update(status, tick)
        if self.browser is not None:
            self.browser.update(tick)
        state = str(tick.state) + (f" ({tick.reason})" if tick.reason else "")
        if self._lines and state != self._said:
            self.line(f"{self._title}: {state}")
        self._said = state

    def finished(self, played: Any, number: int, of: int) -> None:
        """An episode is over."""
        outcome = {True: "success", False: "failure", None: played.state}[played.success if played.done else None]
        seed = "" if played.seed is None else f", seed {played.seed}"
        text = f"episode {number} of {of}{seed}: {outcome}, {played.steps} steps, {played.ticks} ticks"
        self.figures.played.append(text)
        if self._lines:
            self.line(text)

    def closing(self, figures: Mapping[str, Any], report: Path) -> None:
        """All is over."""
        if figures["n"]:
            share = " ".join(f"{100 * figures[key]:.1f}" for key in ("success", "low", "high")).split()
            self.line(f"success {share[0]} % [{share[1]}, {share[2]}] of {figures['n']} episodes")
        p50, p99 = figures["period_p50_ms"], figures["period_p99_ms"]
        period = "" if p50 is None or figures["lockstep"] else f", period p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        kinds = ", ".join(f"{count} {kind}" for kind, count in figures["interventions"].items()) or "none"
        misses = f"{figures['deadline_misses']} deadline misses"
        self.line(f"{figures['ticks']} ticks{period}, {misses}; interventions: {kinds}")
        self.line(f"report: {report}")

    def watch(self, transport: Transport) -> None:
        """What there is to see comes over `transport`; call it before every episode."""
        if self.browser is not None:
            self.browser.watch(transport)

    @property
    def stopped(self) -> bool:
        """Whether somebody who watches wants an emergency stop."""
        return self.browser is not None and self.browser.pressed

    def line(self, text: str) -> None:
        """Say something, above the table where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __rich__(self) -> Group:
        now, table = self.figures.snapshot(), Table.grid(padding=(0, 2))
        heading = Text(f"{self._title}   ").append(f"{now['state']} {now['reason']}", COLOURS.get(now["state"], ""))
        table.add_row("rate", f"{now['rate'] or 0.0:6.1f} of {now['wanted_rate']:g} Hz", f"{now['missed']} missed")
        table.add_row("jitter", f"{1e3 * (now['jitter'] or 0.0):6.1f} ms", "p99, off the period")
        table.add_row("inference", f"{1e3 * now['latency']:6.1f} ms", "p95")
        table.add_row("chunk", f"{1e3 * now['remaining']:6.0f} ms", "left to play")
        done = now["interventions"]
        table.add_row("interventions", f"{sum(done.values()):6d}", ", ".join(f"{k} {n}" for k, n in done.items()))
        for key, (age, limit) in now["ages"].items():
            bar = ProgressBar(total=limit, completed=min(age if age is not None else limit, limit), width=24)
            table.add_row(f"age of {key}", "   -" if age is None else f"{1e3 * age:6.1f} ms", bar)
        return Group(heading, table, *(Text(text, "dim") for text in now["played"]))


@contextmanager
def open_view(plain: bool, figures: Figures, browser: str | None = None) -> Iterator[View]:
    """The view of a run: a live table on a terminal unless `plain`, else lines; and one at the address `browser`.

    Raises:
        UserError: It cannot listen there.
    """
    console = Console()
    lines = plain or not console.is_terminal
    with ExitStack() as stack:
        page = stack.enter_context(closing(BrowserView(browser, figures))) if browser else None
        view = View(console, figures, page, lines=lines)
        if page is not None:
            view.line(f"viewer: {page.url}")
        if not lines:
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(SWITCH)
            stack.enter_context(Live(view, console=console, refresh_per_second=REFRESH))
        yield view
