"""A few threads that share one job at a time, the calling thread among them.

A control step of a small robot takes half a millisecond on all cores, so waking threads is what costs. Here the caller
works itself instead of waiting, and whoever is free takes the next chunk. The work must release the GIL, as MuJoCo's
physics does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

Job = Callable[[int, int, int], None]
"""`job(member, start, stop)` does rows `start` to `stop` with the private memory of `member`."""

_CHUNKS_PER_MEMBER = 2
_SMALLEST_CHUNK = 4  # rows; below, handing chunks out costs more than waiting for the slowest


class Team:
    """The calling thread and `size - 1` helpers, which sleep between jobs and end with `close`."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._calls: list[SimpleQueue[tuple[Job, int, Iterator[int]] | None]] = []
        self._done: SimpleQueue[Exception | None] = SimpleQueue()
        for member in range(1, self.size):
            calls: SimpleQueue[tuple[Job, int, Iterator[int]] | None] = SimpleQueue()
            threading.Thread(target=self._serve, args=(member, calls), daemon=True, name=f"sim-{member}").start()
            self._calls.append(calls)

    def run(self, job: Job, count: int) -> None:
        """Do rows 0 to `count`; returns when all are done, raises what any member raised."""
        if not self._calls or count <= _SMALLEST_CHUNK:
            job(0, 0, count)
            return
        chunks = itertools.count()  # advancing it is atomic, so every chunk is taken once
        for calls in self._calls:
            calls.put((job, count, chunks))
        try:
            self._work(0, job, count, chunks)
        finally:
            errors = [self._done.get() for _ in self._calls]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the helpers; safe to call twice."""
        for calls in self._calls:
            calls.put(None)
        self._calls = []

    def _serve(self, member: int, calls: SimpleQueue[tuple[Job, int, Iterator[int]] | None]) -> None:
        while (call := calls.get()) is not None:
            try:
                self._work(member, *call)
                self._done.put(None)
            except Exception as error:
                self._done.put(error)

    def _work(self, member: int, job: Job, count: int, chunks: Iterator[int]) -> None:
        size = max(_SMALLEST_CHUNK, -(-count // (_CHUNKS_PER_MEMBER * self.size)))
        for start in map(size.__mul__, chunks):
            if start >= count:
                return
            job(member, start, min(start + size, count))
