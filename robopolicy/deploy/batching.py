"""Dynamic batching of requests of many clients into few calls of one policy.

Requests within a short window share a call. A reply does not depend on other requests: each request is checked first,
draws noise from its own streams, is computed separately if the shared call fails, and gets its own error if its chunk
is not finite. Other batch sizes round sums differently, by about 1e-7 of a value; `max_batch=1` avoids this.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.contract import ChunkPolicy
from robopolicy.deploy.wire import Greeting, Request
from robopolicy.errors import UserError
from robopolicy.rng import episode_rng
from robopolicy.spec import IMAGE_PREFIX

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


Streams = Sequence[tuple[int, int]]  # seed and step of each row, from which its noise is drawn
Batch = Mapping[str, NDArray[Any]]  # {key: (B, To, ...)} float32, images uint8


class BatchedPolicy(Protocol):
    """Interface of batched policies, called from one thread."""

    @property
    def greeting(self) -> Greeting:
        """Specification of the policy."""
        ...

    def chunks(
        self, obs: Batch, noise: NDArray[Any] | None, prefix: NDArray[Any] | None, streams: Streams
    ) -> NDArray[Any]:
        """Compute chunks `(B, H, A)`.

        Args:
            obs: Exactly the observations of the greeting.
            noise: `(B, H, A)`, only if the greeting has `noise`.
            prefix: `(B, d, A)`, only if the greeting has `prefix`.
            streams: Random streams for policies without `noise`; row i uses only its own stream.
        """
        ...


class ServedChunkPolicy:
    """Batched interface of a `ChunkPolicy`, which is called for each row."""

    def __init__(
        self, source: ChunkPolicy, model: str = "", *, noise_shape: tuple[int, ...] = (), network_calls: int = 1
    ) -> None:
        """Wrap `source`.

        Args:
            source: Policy to serve, which must be stateless, since earlier observations may be of other clients.
            model: Name of the model.
            noise_shape: Shape of the argument `noise` of `chunk`, as for a bundle; () if the policy draws its own
                noise, so that chunks depend on earlier requests.
            network_calls: Network evaluations per chunk, if known.
        """
        self._source: Any = source
        self._noise_shape = noise_shape
        spec = source.spec
        noise = noise_shape == (spec.horizon, spec.action_dim)
        self.greeting = Greeting(spec, model, noise, source.takes_prefix, network_calls)

    def chunks(
        self, obs: Batch, noise: NDArray[Any] | None, prefix: NDArray[Any] | None, streams: Streams
    ) -> NDArray[Any]:
        """Compute chunks with one call per row."""
        found: list[NDArray[Any]] = []
        for i, (seed, step) in enumerate(streams):
            row = {key: value[i] for key, value in obs.items()}
            options: dict[str, Any] = {}
            if self._noise_shape:
                draw = episode_rng(seed, step).standard_normal
                options["noise"] = draw(self._noise_shape, dtype=np.float32) if noise is None else noise[i]
            found.append(self._source.chunk(row, None if prefix is None else prefix[i], **options))
        return np.stack(found)


@dataclass(frozen=True)
class PendingRequest:
    """Checked request in the queue."""

    obs: Batch
    noise: NDArray[np.float32] | None
    prefix: NDArray[np.float32] | None
    streams: Streams
    until: float  # [s, monotonic] deadline
    future: Future[NDArray[np.float32]]

    @property
    def kind(self) -> tuple[bool, int]:
        """Key of requests that can share a batch: presence of noise, and length of the prefix."""
        return self.noise is not None, 0 if self.prefix is None else self.prefix.shape[1]


def check_request(request: Request, greeting: Greeting, seed: int) -> PendingRequest:
    """Check a request, with `seed` by default; raises `UserError` if it does not fit or is not finite."""
    spec = greeting.spec
    missing = [key for key in spec.observation if key not in request.obs]
    if missing:
        raise UserError(f"The observation '{missing[0]}' is missing, got {', '.join(sorted(request.obs)) or 'none'}.")
    rows = max(len(np.atleast_1d(request.obs[key])) for key in spec.observation)
    obs: dict[str, NDArray[Any]] = {}
    for key, shape in spec.observation.items():
        kind = np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32
        obs[key] = _checked(f"'{key}'", request.obs[key], (rows, spec.obs_horizon, *shape), kind)
    noise = prefix = None
    if request.noise is not None:
        if not greeting.noise:
            raise UserError("This policy does not accept noise.")
        noise = _checked("noise", request.noise, (rows, spec.horizon, spec.action_dim), np.float32)
    if request.prefix is not None and request.prefix.size:
        if not greeting.prefix:
            raise UserError("This policy does not accept a prefix.")
        if request.prefix.ndim != 3:
            raise UserError(f"Expected prefix of shape (B, d, {spec.action_dim}), found {request.prefix.shape}.")
        length = request.prefix.shape[1]
        if length >= spec.horizon:
            raise UserError(f"A prefix must be shorter than a chunk of {spec.horizon} actions, found {length}.")
        prefix = _checked("prefix", request.prefix, (rows, length, spec.action_dim), np.float32)
    base = seed if request.seed is None else request.seed
    streams = [(base, request.number << 16 | row) for row in range(rows)]
    until = time.monotonic() + (np.inf if request.deadline is None else request.deadline)
    return PendingRequest(obs, noise, prefix, streams, until, Future())


def _checked(what: str, value: NDArray[Any], shape: tuple[int, ...], kind: type) -> NDArray[Any]:
    if value.ndim != len(shape) or value.shape[1:] != shape[1:] or not 0 < len(value) < 2**16:
        expected = f"(B, {', '.join(map(str, shape[1:]))})"
        raise UserError(f"Expected {what} of shape {expected}, found {value.shape}.")
    if len(value) != shape[0]:
        raise UserError(f"Expected {what} with {shape[0]} rows like the others, found {len(value)}.")
    if kind is np.uint8 and value.dtype != np.uint8:
        raise UserError(f"Expected {what} as bytes (uint8), found {value.dtype}.")
    with np.errstate(over="ignore"):  # overflow to infinity is an error below
        converted = value.astype(kind, copy=False)
    if not np.isfinite(converted).all():
        raise UserError(f"Expected finite numbers in {what}, found NaN or infinity.")
    return converted


class Batcher:
    """Thread that collects requests, calls the policy in batches and returns the results."""

    def __init__(self, served: BatchedPolicy, statistics: ServerStatistics, *, max_batch: int, window: float) -> None:
        """Start the thread.

        Args:
            served: Policy.
            statistics: Statistics to update.
            max_batch: Maximum number of observations per call.
            window: Maximum batching delay [s]. A client has one request at a time, so a batch starts early once all
                clients have sent a request.
        """
        self._served, self._statistics = served, statistics
        self._max_batch, self._window = max_batch, window
        self._requests: queue.SimpleQueue[PendingRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)  # the policy may hang
        self._thread.start()

    def submit(self, request: PendingRequest) -> Future[NDArray[np.float32]]:
        """Queue a request; the result is a chunk `(B, H, A)` or an exception."""
        self._requests.put(request)
        return request.future

    def close(self) -> None:
        """Process the queue and end the thread, unless the policy hangs."""
        self._requests.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            batch = [self._requests.get()]
            until = time.monotonic() + self._window
            while batch[-1] is not None and self._has_room(batch):
                try:
                    batch.append(self._requests.get(timeout=max(until - time.monotonic(), 0)))
                except queue.Empty:
                    break
            kinds: dict[tuple[bool, int], list[PendingRequest]] = {}
            for request in batch:
                if request is not None and request.future.set_running_or_notify_cancel():
                    kinds.setdefault(request.kind, []).append(request)
            for requests in kinds.values():
                self._process(requests)
            if batch[-1] is None:
                return

    def _has_room(self, batch: Sequence[PendingRequest | None]) -> bool:
        rows = sum(len(request.streams) for request in batch if request is not None)
        return rows < self._max_batch and len(batch) < self._statistics.clients

    def _process(self, requests: list[PendingRequest]) -> None:
        now = time.monotonic()
        for request in requests:
            if now > request.until:
                request.future.set_exception(UserError("The deadline passed before the request was computed."))
        requests = [request for request in requests if not request.future.done()]
        if not requests:
            return
        try:
            chunks = self._compute(requests)
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
            else:  # compute requests separately to find the failing one
                for request in requests:
                    self._process([request])
            return
        for request in requests:
            chunk, chunks = chunks[: len(request.streams)], chunks[len(request.streams) :]
            if np.isfinite(chunk).all():
                request.future.set_result(chunk)
            else:
                request.future.set_exception(UserError("The policy returned a non-finite action."))

    def _compute(self, requests: Sequence[PendingRequest]) -> NDArray[np.float32]:
        """Chunks of all rows, in calls of at most `max_batch`."""
        obs = {key: _joined([request.obs[key] for request in requests]) for key in requests[0].obs}
        noise, prefix = (
            None if getattr(requests[0], name) is None else _joined([getattr(request, name) for request in requests])
            for name in ("noise", "prefix")
        )
        streams = [stream for request in requests for stream in request.streams]
        parts: list[NDArray[np.float32]] = []
        for first in range(0, len(streams), self._max_batch):
            rows = slice(first, first + self._max_batch)
            start = time.monotonic()
            batch = {key: value[rows] for key, value in obs.items()}
            part_noise, part_prefix = (None if value is None else value[rows] for value in (noise, prefix))
            part = np.asarray(self._served.chunks(batch, part_noise, part_prefix, streams[rows]), np.float32)
            self._statistics.record_batch(len(streams[rows]), time.monotonic() - start)
            spec = self._served.greeting.spec
            expected = (len(streams[rows]), spec.horizon, spec.action_dim)
            if part.shape != expected:
                raise UserError(f"The policy returned shape {part.shape} instead of chunks of shape {expected}.")
            parts.append(part)
        return _joined(parts)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
