"""How long answers took and what became of requests: counters of a server or client, safe to share between threads."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

RECENT = 1000  # answers whose times are kept for percentiles
PERCENTILES = (50, 95, 99)


class Latency:
    """Times [s] of the last thousand answers."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Count one."""
        with self._lock:
            self._recent.append(seconds)

    def percentile(self, q: float) -> float:
        """Time [s] within which `q` percent came; 0 before the first."""
        with self._lock:
            return float(np.percentile(self._recent, q)) if self._recent else 0.0

    def to_dict(self, name: str) -> dict[str, float]:
        """`name_p50_ms` and so on."""
        return {f"{name}_p{q}_ms": round(1e3 * self.percentile(q), 3) for q in PERCENTILES}


class ServerStatistics:
    """What a server has done since it started."""

    def __init__(self) -> None:
        self.latency = Latency()  # from a request's arrival to its answer
        self.compute = Latency()  # of one batch
        self.requests = self.errors = self.deadline_misses = 0
        self.batches = self.rows = self.largest_batch = 0
        self.refused_clients = 0
        self.clients = 0  # connected now
        self._since = time.monotonic()

    def answered(self, seconds: float, deadline: float | None, *, failed: bool) -> None:
        """Count a request that took so long and wanted to be answered within `deadline` seconds."""
        self.latency.add(seconds)
        self.requests += 1
        self.errors += failed
        self.deadline_misses += deadline is not None and seconds > deadline

    def computed(self, rows: int, seconds: float) -> None:
        """Count a batch."""
        self.compute.add(seconds)
        self.batches, self.rows = self.batches + 1, self.rows + rows
        self.largest_batch = max(self.largest_batch, rows)

    def to_dict(self) -> dict[str, float]:
        """All numbers by name; times in ms."""
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
        """For a log."""
        s = self.to_dict()
        times = " ".join(f"p{q} {s[f'latency_p{q}_ms']:.1f}" for q in PERCENTILES)
        return (
            f"{s['clients']} clients, {s['requests']} requests, {s['errors']} errors, {s['deadline_misses']} deadlines "
            f"missed, latency {times} ms, {s['mean_batch']:.1f} observations a batch"
        )
