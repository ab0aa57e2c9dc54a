"""Progress bars on stderr; their updates also handle stop requests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from types import FrameType

from robopolicy.shutdown import detach_terminal, stop_signals

RETRY_DELAY = 0.05  # [s] after which a request that came while a module was imported is made again

MAX_RETRIES = 600  # how often it is, before it is obeyed all the same

_deferred: list[int] = []  # requests that came while a module was imported
_requested: list[int] = []  # signals that asked this program to stop
_bars: list[bool] = []  # not empty while progress bars are shown


def listen_for_stop() -> None:
    """Let `stop_signals` unwind the stack, so that nothing half-written stays behind.

    Out of a signal handler an exception may come between making a folder and remembering it, and is lost where foreign
    code swallows it (NumPy's C loops, Arrow's callbacks). So while progress bars are shown the first request waits for
    their next update; a second one does not.
    """
    previous = signal.getsignal(signal.SIGINT)
    for number in stop_signals():
        if number != signal.SIGINT or previous is signal.default_int_handler:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    if len(_deferred) < MAX_RETRIES and _importing(frame):  # there an exception is lost, or leaves half a module behind
        _deferred.append(number)
        again = Timer(RETRY_DELAY, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
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
    """Print the line of `hint`, which says how to resume, when a stop request ends the context."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if line := hint():
            print(line, file=sys.stderr)
        raise


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Yields `add(label, total)`, which returns the function to call with the number completed so far."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with _waiting(), ExitStack() as shown:
        progress = Progress(*columns, console=Console(stderr=True))

        def add(label: str, total: int) -> Callable[[int], None]:
            if not progress.tasks:  # shown without a bar it would print an empty line
                shown.enter_context(progress)
            bar = progress.add_task(label, total=total)

            def update(completed: int) -> None:
                _raise_stop()
                progress.update(bar, completed=completed)

            return update

        yield add


@contextmanager
def _waiting() -> Iterator[None]:
    _bars.append(True)
    try:
        yield
    finally:
        _bars.pop()
    _raise_stop()
