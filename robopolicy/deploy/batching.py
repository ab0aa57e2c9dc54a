"""Dynamic batching of requests of many clients into few calls of one policy.

Requests within a short window share a call. A reply does not depend on other requests: each request is checked first,
draws noise from its own streams, is computed separately if the shared call fails, and gets its own error if its chunk
is not finite. Other batch sizes round sums differently, by about 1e-7 of a value; `max_batch=1` avoids this.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.contract import ChunkPolicy
from robopolicy.deploy.statistics import ServerStatistics
from robopolicy.deploy.wire import Greeting, Request
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy.rng import episode_rng
from robopolicy.spec import IMAGE_PREFIX

MAX_SLOWDOWN = 1.5  # time of a call that several clients share, relative to a call for one observation
FAST_SECONDS, SMOOTHING = 0.001, 0.1  # a time that is never too long; weight of a new time in the moving average
SINGLE_CALLS = 200  # calls for one observation after which two are tried again


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
            streams: Random streams of the rows where no noise is given; row i uses only its own stream.
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


@dataclass(eq=False)
class PendingRequest:
    """Checked request of one client, computed in one or several parts."""

    obs: Batch
    noise: NDArray[np.float32] | None
    prefix: NDArray[np.float32] | None
    streams: Streams
    until: float  # [s, monotonic] deadline
    future: Future[NDArray[np.float32]] = field(default_factory=Future[NDArray[np.float32]])
    parts: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])  # computed chunks

    @property
    def kind(self) -> tuple[bool, int]:
        """Key of requests that can share a batch: presence of noise, and length of the prefix."""
        return self.noise is not None, 0 if self.prefix is None else self.prefix.shape[1]

    @property
    def left(self) -> int:
        """Rows that are not computed."""
        return len(self.streams) - sum(len(part) for part in self.parts)


@dataclass(frozen=True)
class RequestPart:
    """The next rows of a request."""

    request: PendingRequest
    rows: slice

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start


def check_request(request: Request, greeting: Greeting, seed: int) -> PendingRequest:
    """Check a request, with streams of `seed` by default; raises `UserError` if it does not fit or is not finite."""
    spec = greeting.spec
    missing = [key for key in spec.observation if key not in request.obs]
    if missing:
        raise UserError(f"The observation '{missing[0]}' is missing, got {', '.join(sorted(request.obs)) or 'none'}.")
    rows = max(len(np.atleast_1d(request.obs[key])) for key in spec.observation)
    if rows > greeting.max_rows:
        raise UserError(f"A request may have {greeting.max_rows} observations, found {rows}; split it.")
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
            chunk = counted(spec.horizon, "action")
            raise UserError(f"A prefix must be shorter than a chunk of {chunk}, found {length}.")
        prefix = _checked("prefix", request.prefix, (rows, length, spec.action_dim), np.float32)
    streams: Streams = [(seed, request.number << 16 | row) for row in range(rows)]
    if request.streams is not None:
        streams = _checked_streams(request.streams, rows)
    until = time.monotonic() + (np.inf if request.deadline is None else request.deadline)
    return PendingRequest(obs, noise, prefix, streams, until)


def _checked_streams(found: NDArray[Any], rows: int) -> Streams:
    if found.dtype != np.int64 or found.shape != (rows, 2) or (found < 0).any():
        text = f"Expected streams of shape ({rows}, 2) as int64 numbers of at least 0"
        raise UserError(f"{text}, found {found.dtype} of shape {found.shape}.")
    return [(int(row[0]), int(row[1])) for row in found]


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
    """Thread that calls the policy for the requests of all clients, a fair share of each call for every client.

    With several clients, a call has so many rows that it takes about `MAX_SLOWDOWN` times as long as a call for one.
    Clients take turns, and a request that does not fit continues in later calls.
    """

    def __init__(
        self,
        served: BatchedPolicy,
        statistics: ServerStatistics,
        *,
        max_batch: int,
        window: float,
        times: Mapping[int, float],
    ) -> None:
        """Start the thread.

        Args:
            served: Policy.
            statistics: Statistics to update.
            max_batch: Maximum number of observations per call.
            times: Seconds of a call by its rows, for one row and some.
            window: Maximum batching delay [s]. A client has one request at a time, so a batch starts early once all
                clients have sent a request.
        """
        self._served, self._statistics = served, statistics
        self._max_batch, self._window = max_batch, window
        self._waiting: deque[PendingRequest] = deque()  # in the order of their turns
        self._changed = threading.Condition()
        self._stopping = False
        rows, self._single_seconds = max(times), times[1]
        per_row = (times[rows] - times[1]) / max(rows - 1, 1)
        slow = times[rows] > FAST_SECONDS and per_row > 0
        fitting = 1 + int((MAX_SLOWDOWN - 1) * times[1] / per_row) if slow else max_batch
        self._shared_rows = min(fitting, max_batch)  # rows of a call with several clients, adapted to its time
        self._single_calls = 0  # successive calls for one row
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)  # the policy may hang
        self._thread.start()

    def submit(self, request: PendingRequest) -> Future[NDArray[np.float32]]:
        """Queue a request; the result is a chunk `(B, H, A)` or an exception."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()
        return request.future

    def close(self, timeout: float = 1.0) -> bool:
        """Refuse the waiting requests and end the thread; return False if the policy computes for longer [s]."""
        with self._changed:
            self._stopping = True
            refused, self._waiting = self._waiting, deque()
            self._changed.notify()
        for request in refused:
            _fail(request, UserError("The server stops."))
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                until = time.monotonic() + self._window
                while not self._stopping and self._has_room() and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._stopping:
                    return
                parts = self._next_parts()
            if parts:
                self._process(parts)

    def _has_room(self) -> bool:
        rows = sum(request.left for request in self._waiting)
        return rows < self._max_batch and len(self._waiting) < self._statistics.clients

    def _next_parts(self) -> list[RequestPart]:
        """Take the rows of the next call, of requests of one kind; unfinished requests go to the end of the queue."""
        now, parts = time.monotonic(), list[RequestPart]()
        unfinished, others = deque[PendingRequest](), deque[PendingRequest]()
        room = self._max_batch
        if self._statistics.clients > 1:
            room = min(room, max(self._shared_rows, len(self._waiting)))
        share = max(1, room // len(self._waiting))
        for request in self._waiting:
            if request.future.done():  # its client is gone
                continue
            if now > request.until:
                _fail(request, UserError("The deadline passed before the request was computed."))
                continue
            if room < 1 or (parts and request.kind != parts[0].request.kind):
                others.append(request)
                continue
            rows, first = min(share, room, request.left), len(request.streams) - request.left
            parts.append(RequestPart(request, slice(first, first + rows)))
            room -= rows
            if request.left > rows:
                unfinished.append(request)
        self._waiting = others + unfinished
        return parts

    def _process(self, parts: Sequence[RequestPart]) -> None:
        try:
            chunks = self._compute(parts)
        except Exception as error:
            if len(parts) == 1:
                self._fail(parts[0].request, error)
            else:  # compute requests separately to find the failing one
                for part in parts:
                    self._process([part])
            return
        for part in parts:
            chunk, chunks = chunks[: len(part)], chunks[len(part) :]
            if not np.isfinite(chunk).all():
                self._fail(part.request, UserError("The policy returned a non-finite action."))
                continue
            part.request.parts.append(chunk)
            if not part.request.left and part.request.future.set_running_or_notify_cancel():
                part.request.future.set_result(_joined(part.request.parts))

    def _fail(self, request: PendingRequest, error: Exception) -> None:
        with self._changed, suppress(ValueError):
            self._waiting.remove(request)
        _fail(request, error)

    def _compute(self, parts: Sequence[RequestPart]) -> NDArray[np.float32]:
        """Chunks of all rows, in one call."""
        requests = [part.request for part in parts]
        obs = {key: _joined([part.request.obs[key][part.rows] for part in parts]) for key in requests[0].obs}
        noise, prefix = (
            None
            if getattr(requests[0], name) is None
            else _joined([getattr(part.request, name)[part.rows] for part in parts])
            for name in ("noise", "prefix")
        )
        streams = [stream for part in parts for stream in part.request.streams[part.rows]]
        start = time.monotonic()
        chunks = np.asarray(self._served.chunks(obs, noise, prefix, streams), np.float32)
        seconds = time.monotonic() - start
        self._statistics.record_batch(len(streams), seconds)
        self._adapt(len(streams), seconds)
        spec = self._served.greeting.spec
        expected = (len(streams), spec.horizon, spec.action_dim)
        if chunks.shape != expected:
            raise UserError(f"The policy returned shape {chunks.shape} instead of chunks of shape {expected}.")
        return chunks

    def _adapt(self, rows: int, seconds: float) -> None:
        """Adapt the rows of shared calls to the time of a call for `rows` rows."""
        self._single_calls = self._single_calls + 1 if rows == 1 else 0
        if rows == 1:
            usual = self._single_seconds
            self._single_seconds += SMOOTHING * (min(seconds, 2 * usual) - usual)
        elif seconds > max(MAX_SLOWDOWN * self._single_seconds, FAST_SECONDS):
            self._shared_rows = max(1, min(self._shared_rows, rows) // 2)
            return
        if rows >= self._shared_rows and (rows > 1 or self._single_calls % SINGLE_CALLS == 0):
            self._shared_rows = min(self._shared_rows + 1, self._max_batch)


def _fail(request: PendingRequest, error: Exception) -> None:
    if request.future.set_running_or_notify_cancel():  # else its client is gone
        request.future.set_exception(error)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
