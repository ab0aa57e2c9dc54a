"""Client of a chunk server as a `ChunkPolicy`, without torch; reconnects after a restart of the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.constraints import NonNegative, NonNegativeInt, Validated
from robopolicy.deploy.contract import Observed
from robopolicy.deploy.statistics import LatencyWindow
from robopolicy.deploy.websocket import WebSocket, parse_address, reason_of
from robopolicy.deploy.wire import Greeting, Reply, Request, WireError
from robopolicy.errors import UserError
from robopolicy.spec import IMAGE_PREFIX, PolicySpec, check_dtype


class Connection:
    """Websocket connection to one address; temporary failures raise `OSError`, so that the caller can retry."""

    def __init__(self, url: str, timeout: float, check: Callable[[Greeting], None] = lambda _: None) -> None:
        """Check the address without connecting.

        Args:
            url: `ws://HOST:PORT`, or `wss://...` with a trusted certificate (the variable SSL_CERT_FILE adds a file of
                certificates).
            timeout: Timeout of a reply [s]; 0 for none.
            check: Called with every greeting; raises an error for an unexpected server.

        Raises:
            UserError: The address is invalid.
        """
        self._address = parse_address(url)
        self.url, self._timeout, self._check = url, timeout or None, check
        self._socket: WebSocket | None = None
        self._greeting: Greeting | None = None
        self._number = 0

    def open(self) -> Greeting:
        """Connect and return the greeting.

        Raises:
            UserError: The server rejects the client, is not a policy server, or fails the check.
            OSError: The server cannot be reached or does not respond in time.
        """
        self.close()
        self._socket = WebSocket(self._address, self._timeout)
        try:
            greeting = Greeting.unpack(self._socket.receive())
            self._check(greeting)
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise UserError(f"The endpoint {self.url} is not a policy server: {error}.") from error
            raise
        return greeting

    def greeting(self) -> Greeting:
        """Return the greeting of the server; connect if necessary."""
        if self._socket is None or self._greeting is None:
            self._greeting = self.open()
        return self._greeting

    def request(self, **request: Any) -> Reply:
        """Send a request with the next number and return its reply.

        Raises:
            UserError: As in `open`, or the reply is an error or belongs to another request.
            OSError: As in `open`, or the connection is lost.
        """
        if self._socket is None:
            self.open()
        assert self._socket is not None
        self._number += 1
        try:
            self._socket.send(Request(self._number, **request).pack())
            reply = Reply.unpack(self._socket.receive())
            if reply.number != self._number and not (reply.error and not reply.number):
                raise WireError(f"expected the reply to request {self._number}, found one to {reply.number}")
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise UserError(f"The endpoint {self.url} returned no message of the wire format: {error}.") from error
            raise
        if reply.error:
            raise UserError(f"The endpoint {self.url} returned no chunk: {reply.error.splitlines()[0]}")
        return reply

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()


INITIAL_BACKOFF, MAX_BACKOFF = 0.05, 1.0  # [s] wait before another attempt, doubled each time


@dataclass(frozen=True)
class ClientConfig(Validated):
    """Timeouts and request settings of a client."""

    timeout: NonNegative = 5.0  # [s] timeout of a reply
    reconnect_timeout: NonNegative = 10.0  # [s] maximum time of attempts to reconnect; 0 for none
    seed: NonNegativeInt = 0  # seed of the noise; a chunk depends on seed, observation and number of earlier chunks
    deadline: NonNegative = 0.0  # [s] after which a queued request fails; 0 for none


class ServerChunkPolicy:
    """Chunk policy of a server."""

    def __init__(self, url: str, config: ClientConfig | None = None) -> None:
        """Connect and read the specification of the policy.

        Args:
            url: `ws://HOST:PORT` or `wss://HOST:PORT`; tokens are bound to hosts (`robopolicy.tokens`).
            config: Timeouts and seed.

        Raises:
            UserError: The server cannot be reached in time, rejects the client, or is not a policy server.
        """
        self.config = config or ClientConfig()
        self.round_trip = LatencyWindow()  # from observation to chunk, without failed attempts
        self._chunks = 0  # requested so far, the steps of the random stream
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connection = Connection(url, self.config.timeout, self._check)
        self._greeting: Greeting | None = None
        with self._lock:
            self._greeting = self._with_retries(self._connection.open)

    @property
    def spec(self) -> PolicySpec:
        """Specification of the policy."""
        return self.greeting.spec

    @property
    def greeting(self) -> Greeting:
        """Greeting of the server."""
        assert self._greeting is not None
        return self._greeting

    @property
    def takes_prefix(self) -> bool:
        """Whether the policy accepts a prefix."""
        return self.greeting.prefix

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Return the chunk `(H, A)` for one observation `{key: (To, ...)}`; waits up to `reconnect_timeout`.

        Raises:
            UserError: The observation does not fit, or the server is lost, rejects the client, or has another policy.
        """
        spec = self.spec
        missing = [key for key in spec.observation if key not in obs]
        if missing:
            raise UserError(f"The policy needs the observation '{missing[0]}', got {', '.join(sorted(obs))}.")
        fields: dict[str, Any] = {"obs": {key: _converted(key, obs[key])[None] for key in spec.observation}}
        if prefix is not None and len(prefix):
            fields["prefix"] = np.asarray(prefix, np.float32)[None]
        fields["deadline"] = self.config.deadline or None
        with self._lock:
            fields["streams"] = np.array([[self.config.seed, self._chunks]])
            self._chunks += 1
            chunk = self._with_retries(lambda: self._timed(fields))
        if chunk.shape != (1, spec.horizon, spec.action_dim):
            raise UserError(f"{self._label} returned shape {chunk.shape} instead of one chunk.")
        if not np.isfinite(chunk).all():
            raise UserError(f"{self._label} returned a non-finite action.")
        return chunk[0].astype(np.float32, copy=False)

    def statistics(self) -> dict[str, Any]:
        """Request the statistics of the server: requests, errors, latency, batches, missed deadlines."""
        with self._lock:
            return dict(self._with_retries(lambda: self._connection.request(stats=True)).stats)

    def close(self) -> None:
        """Close the connection; a call in another thread fails."""
        self._closed.set()
        self._connection.close()

    @property
    def _label(self) -> str:
        return f"The endpoint {self._connection.url}"

    def _timed(self, fields: dict[str, Any]) -> NDArray[Any]:
        start = time.monotonic()
        chunk = self._connection.request(**fields).chunk
        self.round_trip.add(time.monotonic() - start)
        return chunk

    def _with_retries(self, attempt: Any) -> Any:
        """Call `attempt` with exponential backoff until the server responds."""
        until, wait = time.monotonic() + self.config.reconnect_timeout, INITIAL_BACKOFF
        while not self._closed.is_set():
            try:
                return attempt()
            except OSError as error:
                left = until - time.monotonic()
                if left <= 0:
                    reason = reason_of(error)
                    raise UserError(
                        f"{self._label} cannot be reached ({reason}); start it or check the address."
                    ) from error
                self._closed.wait(min(wait, left))
                wait = min(2 * wait, MAX_BACKOFF)
        raise UserError(f"The connection to {self._connection.url} has been closed.")

    def _check(self, greeting: Greeting) -> None:
        """Raise an error if the server serves another policy than at the first connection."""
        if self._greeting is not None and greeting != self._greeting:
            raise UserError(f"{self._label} now serves another policy ('{greeting.model}'); stop and connect again.")


def _converted(key: str, value: NDArray[Any]) -> NDArray[Any]:
    """Convert numbers to float32, like the server; overflow becomes infinity, which the server refuses."""
    array = np.asarray(value)
    check_dtype(key, array.dtype)
    with np.errstate(over="ignore"):
        return array if key.startswith(IMAGE_PREFIX) else array.astype(np.float32)
