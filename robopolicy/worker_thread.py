"""Calls on a second thread, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from robopolicy.device import use_configured_threads

Calls = SimpleQueue[Callable[[], Any] | None]
Results = SimpleQueue[tuple[Any, Exception | None]]


class CallTimeout(TimeoutError):
    """A call has not ended in time, unlike a TimeoutError that the call raises."""


class WorkerThread:
    """Second thread, which makes the calls of `send` in their order; `receive` returns their results in that order.

    The thread ends with its owner, after the call in progress, and does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: Calls = SimpleQueue()
        self._results: Results = SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls, self._results), daemon=True, name=name).start()

    def send(self, call: Callable[[], Any]) -> None:
        """Make `call` after the earlier ones."""
        self._calls.put(call)

    def receive(self, timeout: float | None = None) -> Any:
        """Return the result of the next call, or raise its exception.

        Raises:
            CallTimeout: There is none within `timeout` [s]; Python cannot stop the call.
        """
        try:
            result, error = self._results.get(timeout=timeout)
        except Empty:
            raise CallTimeout(f"no answer within {timeout:g} s") from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Drop the calls that have not started, and end the thread."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put(None)

    def __del__(self) -> None:
        self.close()


def _serve(calls: Calls, results: Results) -> None:
    use_configured_threads()
    while (call := calls.get()) is not None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))
