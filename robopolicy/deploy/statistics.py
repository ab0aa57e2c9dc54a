"""Statistics of a policy server and its clients: latency percentiles, batches, errors and missed deadlines."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

RECENT = 1000  # number of replies in the percentiles
PERCENTILES = (50, 95, 99)


class LatencyWindow:
    """Latency percentiles [s] over the last `RECENT` replies."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Record a latency."""
        with self._lock:
            self._recent.append(seconds)

    def percentile(self, q: float) -> float:
        """Percentile `q` of the latencies [s]; 0 without any."""
        with self._lock:
            return float(np.percentile(self._recent, q)) if self._recent else 0.0

    def to_dict(self, name: str) -> dict[str, float]:
        """Percentiles by name, such as `<name>_p50_ms`."""
        return {f"{name}_p{q}_ms": round(1e3 * self.percentile(q), 3) for q in PERCENTILES}


class ServerStatistics:
    """Statistics of a server since its start."""

    def __init__(self) -> None:
        self.latency = LatencyWindow()  # from the arrival of a request to its reply
        self.compute = LatencyWindow()  # of one batch
        self.requests = self.errors = self.deadline_misses = 0
        self.batches = self.rows = self.largest_batch = 0
        self.refused_clients = 0
        self.clients = 0  # connected clients
        self._since = time.monotonic()

    def record_reply(self, seconds: float, deadline: float | None, *, failed: bool) -> None:
        """Record a reply after `seconds` to a request with an optional `deadline` [s]."""
        self.latency.add(seconds)
        self.requests += 1
        self.errors += failed
        self.deadline_misses += deadline is not None and seconds > deadline

    def record_batch(self, rows: int, seconds: float) -> None:
        """Record a batch."""
        self.compute.add(seconds)
        self.batches, self.rows = self.batches + 1, self.rows + rows
        self.largest_batch = max(self.largest_batch, rows)

    def to_dict(self) -> dict[str, float]:
        """All statistics by name; latencies in ms."""
        return {
            "uptime_s": round(time.monotonic() - self._since, 1),
            "clients": self.clients,
            "refused_clients": self.refused_clients,
            "requests": self.requests,
            "errors": self.errors,
            "deadline_misses": self.deadline_misses,
            **self.latency.to_dict("latency"),
            **self.compute.to_dict("compute"),
            "batches": self.batches,
            "mean_batch": round(self.rows / self.batches, 2) if self.batches else 0.0,
            "largest_batch": self.largest_batch,
        }

    def line(self) -> str:
        """Summary in one line, for logs."""
        s = self.to_dict()
        times = " ".join(f"p{q} {s[f'latency_p{q}_ms']:.1f}" for q in PERCENTILES)
        return (
            f"{s['clients']} clients, {s['requests']} requests, {s['errors']} errors, {s['deadline_misses']} deadlines "
            f"missed, latency {times} ms, {s['mean_batch']:.1f} observations a batch"
        )
