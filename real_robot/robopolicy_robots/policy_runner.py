"""Asynchronous inference in a thread: one request at a time, so that the control loop never waits."""

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

from robopolicy.deploy.contract import ChunkPolicy, Observed
from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InferenceResult:
    """Result of a request: a chunk or a fault."""

    observed: float  # [s] time of the observation
    seconds: float  # inference time
    chunk: NDArray[Any] | None = None  # (H, A), finite
    fault: str = ""  # shape | non-finite | unavailable | exception
    detail: str = ""  # one line


class InferenceRunner(Protocol):
    """Interface of non-blocking inference."""

    spec: PolicySpec
    takes_prefix: bool

    @property
    def busy(self) -> bool:
        """Whether a request is in progress; further requests are then rejected."""
        ...

    @property
    def latency(self) -> float:
        """95th percentile of the time of recent requests [s]."""
        ...

    def request(self, obs: Observed, observed: float, prefix: NDArray[Any] | None = None) -> bool:
        """Start computing the chunk for `obs`; return False if busy."""
        ...

    def poll(self) -> InferenceResult | None:
        """Return a finished result once, else None."""

    def close(self) -> None:
        """Close the policy without waiting for a request in progress."""


def infer(source: ChunkPolicy, obs: Observed, observed: float, prefix: NDArray[Any] | None) -> InferenceResult:
    """Run one request, with all exceptions converted to faults."""
    start = time.perf_counter()

    def result(fault: str = "", detail: str = "", chunk: NDArray[Any] | None = None) -> InferenceResult:
        return InferenceResult(observed, time.perf_counter() - start, chunk, fault, detail)

    try:
        chunk = np.asarray(source.chunk(obs) if prefix is None else source.chunk(obs, prefix))
    except UserError as error:
        return result("unavailable", str(error))
    except Exception as error:
        log.exception("The policy raised")
        return result("exception", f"{type(error).__name__}: {error}")
    expected = (source.spec.horizon, source.spec.action_dim)
    if chunk.shape != expected or chunk.dtype.kind not in "fiu":
        return result("shape", f"expected numbers of shape {expected}, found {chunk.dtype} {chunk.shape}")
    if not np.isfinite(chunk).all():
        return result("non-finite", f"{int((~np.isfinite(chunk)).sum())} of {chunk.size} numbers")
    return result(chunk=chunk)


class PolicyRunner:
    """Thread that runs a policy, isolated from its hangs and exceptions."""

    def __init__(self, source: ChunkPolicy, on_result: Callable[[InferenceResult], None] | None = None) -> None:
        self.spec, self.takes_prefix = source.spec, source.takes_prefix
        self._source, self._on_result = source, on_result
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._request: tuple[Observed, float, NDArray[Any] | None] | None = None
        self._requested = 0.0  # [s] time of the request
        self._result: InferenceResult | None = None
        self._busy = self._closed = False
        self._seconds: deque[float] = deque(maxlen=100)
        self._latency = 0.0
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a request is in progress; further requests are then rejected."""
        return self._busy

    @property
    def latency(self) -> float:
        """95th percentile of the time of recent requests [s] except the first; 0 before the second."""
        return self._latency  # read several times per tick, computed once per result

    def request(self, obs: Observed, observed: float, prefix: NDArray[Any] | None = None) -> bool:
        """Start computing the chunk for `obs` of time `observed` [s]; return False if busy."""
        with self._lock:
            if self._busy or self._closed:
                return False
            self._busy = True
            self._request, self._requested = (obs, observed, prefix), time.perf_counter()
        self._wake.set()
        return True

    def poll(self) -> InferenceResult | None:
        """Return a finished result once, else None."""
        with self._lock:
            result, self._result = self._result, None
        return result

    def close(self) -> None:
        """End the thread once it is idle; a hanging request is abandoned."""
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
            result = infer(self._source, *self._request)
            if warm:  # the first request includes loading and compilation
                self._seconds.append(time.perf_counter() - self._requested)  # includes the time until the thread runs
                self._latency = float(np.quantile(self._seconds, 0.95))
            with self._lock:
                self._result, self._busy, warm = result, False, True
            if self._on_result is not None:
                self._on_result(result)
        self._source.close()
