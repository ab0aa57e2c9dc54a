"""Progress bars on stderr that also handle stop signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from types import FrameType

from robopolicy.shutdown import detach_terminal, stop_signals

RETRY_DELAY = 0.05  # [s] until a signal that arrived during an import is sent again
MAX_RETRIES = 600  # number of retries before the signal stops the import

_deferred: list[int] = []  # signals that arrived during an import
_requested: list[int] = []  # signals that requested a stop
_bars: list[bool] = []  # not empty while progress bars are active


def handle_stop_signals() -> None:
    """Let `stop_signals` unwind the stack, so that no partial output is left.

    An exception in a signal handler may be raised between the creation of a folder and the start of its cleanup, and
    foreign code may swallow it (NumPy's C loops, Arrow's callbacks). So while progress bars are active, the first
    signal is handled at their next update; a second one is handled immediately.
    """
    previous = signal.getsignal(signal.SIGINT)
    for number in stop_signals():
        if number != signal.SIGINT or previous is signal.default_int_handler:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    if len(_deferred) < MAX_RETRIES and _importing(frame):  # an exception would be lost or leave a partial module
        _deferred.append(number)
        timer = Timer(RETRY_DELAY, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        return
    detach_terminal(number)
    _requested.append(number)
    if not _bars or len(_requested) > 1:
        _raise_stop()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _raise_stop() -> None:
    if _requested:
        if _requested[-1] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + _requested[-1])


@contextmanager
def hint_when_stopped(hint: Callable[[], str]) -> Iterator[None]:
    """Print the line of `hint`, which explains how to resume, when a stop signal ends the context."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if line := hint():
            print(line, file=sys.stderr)
        raise


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Yield `add(label, total)`, which returns a function that takes the number completed so far."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with _deferred_stop(), ExitStack() as display:
        progress = Progress(*columns, console=Console(stderr=True))

        def add(label: str, total: int) -> Callable[[int], None]:
            if not progress.tasks:  # without a bar the display would print an empty line
                display.enter_context(progress)
            bar = progress.add_task(label, total=total)

            def update(completed: int) -> None:
                _raise_stop()
                progress.update(bar, completed=completed)

            return update

        yield add


@contextmanager
def _deferred_stop() -> Iterator[None]:
    _bars.append(True)
    try:
        yield
    finally:
        _bars.pop()
    _raise_stop()
