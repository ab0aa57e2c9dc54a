"""Inference beside the control loop: one request at a time, in a thread of its own, so that the loop never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.contract import ChunkSource, Observed
from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What came of a request: a chunk, or what went wrong."""

    observed: float  # [s] when the observation was taken
    seconds: float  # spent on it
    chunk: NDArray[Any] | None = None  # (H, A), finite
    fault: str = ""  # shape | non-finite | unavailable | exception
    detail: str = ""  # one line


class Runner(Protocol):
    """Answers requests without ever making the caller wait."""

    spec: PolicySpec
    takes_prefix: bool

    @property
    def busy(self) -> bool:
        """Whether a request is under way; another one would be refused."""
        ...

    @property
    def latency(self) -> float:
        """Seconds that 95 % of the recent requests did not exceed."""
        ...

    def request(self, obs: Observed, observed: float, prefix: NDArray[Any] | None = None) -> bool:
        """Start computing the chunk for `obs`; False if it is busy."""
        ...

    def poll(self) -> Answer | None:
        """The answer that is ready, once."""
        ...

    def close(self) -> None:
        """Free the source, without waiting for a request under way."""
        ...


def ask(source: ChunkSource, obs: Observed, observed: float, prefix: NDArray[Any] | None) -> Answer:
    """One request, whatever happens."""
    start = time.perf_counter()

    def answer(fault: str = "", detail: str = "", chunk: NDArray[Any] | None = None) -> Answer:
        return Answer(observed, time.perf_counter() - start, chunk, fault, detail)

    try:
        chunk = np.asarray(source.chunk(obs) if prefix is None else source.chunk(obs, prefix))
    except UserError as error:
        return answer("unavailable", str(error))
    except Exception as error:
        log.exception("The policy raised")
        return answer("exception", f"{type(error).__name__}: {error}")
    expected = (source.spec.horizon, source.spec.action_dim)
    if chunk.shape != expected or chunk.dtype.kind not in "fiu":
        return answer("shape", f"expected numbers of shape {expected}, found {chunk.dtype} {chunk.shape}")
    if not np.isfinite(chunk).all():
        return answer("non-finite", f"{int((~np.isfinite(chunk)).sum())} of {chunk.size} numbers")
    return answer(chunk=chunk)


class PolicyRunner:
    """Asks a source in a thread; what hangs or raises there stays there."""

    def __init__(self, source: ChunkSource, on_answer: Callable[[Answer], None] | None = None) -> None:
        self.spec, self.takes_prefix = source.spec, source.takes_prefix
        self._source, self._on_answer = source, on_answer
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._request: tuple[Observed, float, NDArray[Any] | None] | None = None
        self._asked = 0.0  # when
        self._answer: Answer | None = None
        self._busy = self._closed = False
        self._seconds: deque[float] = deque(maxlen=100)
        self._latency = 0.0
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a request is under way; another one would be refused."""
        return self._busy

    @property
    def latency(self) -> float:
        """Seconds that 95 % of the recent requests did not exceed, but for the first; 0 before the second."""
        return self._latency  # asked for several times a tick, so computed once an answer

    def request(self, obs: Observed, observed: float, prefix: NDArray[Any] | None = None) -> bool:
        """Start computing the chunk for `obs`, seen at `observed` [s]; False if it is busy."""
        with self._lock:
            if self._busy or self._closed:
                return False
            self._busy = True
            self._request, self._asked = (obs, observed, prefix), time.perf_counter()
        self._wake.set()
        return True

    def poll(self) -> Answer | None:
        """The answer that is ready, once."""
        with self._lock:
            answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """End the thread once it is idle; a request that hangs is left behind."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        warm = False
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                break
            assert self._request is not None
            answer = ask(self._source, *self._request)
            if warm:  # the first answer loads and compiles, and says nothing of later ones
                self._seconds.append(time.perf_counter() - self._asked)  # with the waits for a processor
                self._latency = float(np.quantile(self._seconds, 0.95))
            with self._lock:
                self._answer, self._busy, warm = answer, False, True
            if self._on_answer is not None:
                self._on_answer(answer)
        self._source.close()
