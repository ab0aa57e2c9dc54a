"""Live display of a run: a table on a terminal or lines of text, and a web page."""

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

from robopolicy.plurals import counted
from robopolicy_robots.browser_dashboard import BrowserDashboard
from robopolicy_robots.metrics import RunMetrics
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import Transport

REFRESH = 4  # frames per second; each one blocks the interpreter for a few milliseconds
SWITCH = 0.0005  # [s] switch interval of the interpreter, so that the control loop interrupts the display
COLOURS = {State.RUN: "green", State.ARMED: "cyan", State.HOLD: "yellow", State.ESTOP: "bold red"}


class RunDisplay:
    """Display of the newest metrics: a table, or with `lines` a line for every change of state."""

    def __init__(self, console: Console, metrics: RunMetrics, browser: BrowserDashboard | None, *, lines: bool) -> None:
        self.metrics, self.browser = metrics, browser
        self._console, self._lines = console, lines
        self._title = f"{metrics.robot.name}, {metrics.task}"
        self._last_state = ""

    def update(self, status: Mapping[str, Any], tick: Tick) -> None:
        """Update the display after a tick."""
        self.metrics.update(status, tick)
        if self.browser is not None:
            self.browser.update(tick)
        state = str(tick.state) + (f" ({tick.reason})" if tick.reason else "")
        if self._lines and state != self._last_state:
            self.line(f"{self._title}: {state}")
        self._last_state = state

    def episode_finished(self, episode: Any, number: int, total: int) -> None:
        """Report the end of an episode."""
        outcome = {True: "success", False: "failure", None: episode.state}[episode.success if episode.done else None]
        seed = "" if episode.seed is None else f", seed {episode.seed}"
        counts = f"{counted(episode.steps, 'step')}, {counted(episode.ticks, 'tick')}"
        text = f"episode {number} of {total}{seed}: {outcome}, {counts}"
        self.metrics.episodes.append(text)
        if self._lines:
            self.line(text)

    def run_finished(self, metrics: Mapping[str, Any], report: Path) -> None:
        """Report the end of the run."""
        if metrics["n"]:
            share = " ".join(f"{100 * metrics[key]:.1f}" for key in ("success", "low", "high")).split()
            self.line(f"success {share[0]} % [{share[1]}, {share[2]}] of {counted(metrics['n'], 'episode')}")
        p50, p99 = metrics["period_p50_ms"], metrics["period_p99_ms"]
        period = "" if p50 is None or metrics["lockstep"] else f", period p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        kinds = ", ".join(f"{count} {kind}" for kind, count in metrics["interventions"].items()) or "none"
        misses = counted(metrics["deadline_misses"], "missed deadline")
        self.line(f"{counted(metrics['ticks'], 'tick')}{period}, {misses}; interventions: {kinds}")
        for kind, meaning in metrics["intervention_meanings"].items():
            self.line(f"  {kind}: {meaning}")
        self.line(f"report: {report}")

    def watch(self, transport: Transport) -> None:
        """Show the cameras of `transport`; called before every episode."""
        if self.browser is not None:
            self.browser.watch(transport)

    @property
    def stopped(self) -> bool:
        """Whether the emergency stop was pressed in the browser."""
        return self.browser is not None and self.browser.estop_pressed

    def line(self, text: str) -> None:
        """Print a line, above the table if any."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __rich__(self) -> Group:
        now, table = self.metrics.snapshot(), Table.grid(padding=(0, 2))
        heading = Text(f"{self._title}   ").append(f"{now['state']} {now['reason']}", COLOURS.get(now["state"], ""))
        table.add_row("rate", f"{now['rate'] or 0.0:6.1f} of {now['target_rate']:g} Hz", f"{now['missed']} missed")
        table.add_row("jitter", f"{1e3 * (now['jitter'] or 0.0):6.1f} ms", "p99, deviation from the period")
        table.add_row("inference", f"{1e3 * now['latency']:6.1f} ms", "p95")
        table.add_row("chunk", f"{1e3 * now['remaining']:6.0f} ms", "remaining")
        done = now["interventions"]
        table.add_row("interventions", f"{sum(done.values()):6d}", ", ".join(f"{k} {n}" for k, n in done.items()))
        for key, (age, limit) in now["ages"].items():
            bar = ProgressBar(total=limit, completed=min(age if age is not None else limit, limit), width=24)
            table.add_row(f"age of {key}", "   -" if age is None else f"{1e3 * age:6.1f} ms", bar)
        return Group(heading, table, *(Text(text, "dim") for text in now["episodes"]))


@contextmanager
def open_view(plain: bool, metrics: RunMetrics, browser: str | None = None) -> Iterator[RunDisplay]:
    """Open a display: a live table on a terminal unless `plain`, else lines; and a web page at address `browser`."""
    console = Console()
    lines = plain or not console.is_terminal
    with ExitStack() as stack:
        page = stack.enter_context(closing(BrowserDashboard(browser, metrics))) if browser else None
        view = RunDisplay(console, metrics, page, lines=lines)
        if page is not None:
            view.line(f"viewer: {page.url}")
        if not lines:
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(SWITCH)
            stack.enter_context(Live(view, console=console, refresh_per_second=REFRESH))
        yield view
