"""A chunk server as a `ChunkSource`, for the computer of a robot: no torch, and patient with a server that restarts."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from numpy.typing import NDArray

from robopolicy.constraints import Natural, NotNegative, Ranged
from robopolicy.deploy.batching import Latency
from robopolicy.deploy.contract import Observed
from robopolicy.deploy.wire import LARGEST, TOKEN, Greeting, Reply, Request, WireError, is_loopback
from robopolicy.errors import UserError, unknown_name
from robopolicy.optional import need
from robopolicy.spec import PolicySpec

SCHEMES = ("ws", "wss")


class Connection:
    """The websocket to one address. What may pass, an `OSError`, is for the caller to try again."""

    def __init__(self, url: str, timeout: float, check: Callable[[Greeting], None] = lambda _: None) -> None:
        """Check the address; nothing is sent yet.

        Args:
            url: `ws://HOST:PORT`, or `wss://...`, whose certificate has to be one that this machine trusts (the
                variable SSL_CERT_FILE names a file with others).
            timeout: Seconds to wait for an answer; 0 waits for ever.
            check: Called with every greeting; raises where the server is not the one that was expected.

        Raises:
            UserError: The address is none.
        """
        self._address = _parse(url)
        self.url, self._timeout, self._check = url, timeout or None, check
        self._line: _WebSocket | None = None
        self._number = 0

    def open(self) -> Greeting:
        """Connect and return the greeting.

        Raises:
            UserError: The server refuses, is none, or fails the check.
            OSError: It cannot be reached or is late.
        """
        self.close()
        self._line = _WebSocket(self._address, _headers(self._address), self._timeout)
        try:
            greeting = Greeting.unpack(self._line.receive())
            self._check(greeting)
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise UserError(f"The endpoint {self.url} is no policy server: {error}.") from error
            raise
        return greeting

    def ask(self, **request: Any) -> Reply:
        """Send a request of these fields, whose number is given here, and wait for its reply.

        Raises:
            UserError: As `open`; the answer is an error, or no reply to this request.
            OSError: As `open`, or the connection is lost.
        """
        if self._line is None:
            self.open()
        assert self._line is not None
        self._number += 1
        try:
            self._line.send(Request(self._number, **request).pack())
            reply = Reply.unpack(self._line.receive())
            if reply.number != self._number and not (reply.error and not reply.number):
                raise WireError(f"expected the reply to request {self._number}, found one to {reply.number}")
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise UserError(f"The endpoint {self.url} returned no message of the wire format: {error}.") from error
            raise
        if reply.error:
            raise UserError(f"The endpoint {self.url} gave no chunk: {reply.error.splitlines()[0]}")
        return reply

    def close(self) -> None:
        """Close the connection, if there is one; the next question opens another."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


class _WebSocket:
    def __init__(self, address: SplitResult, headers: dict[str, str], timeout: float | None) -> None:
        client = need("websockets.sync.client", "remote")
        self._errors = need("websockets.exceptions", "remote")
        self._timeout = timeout
        self._connection = ExitStack()  # newer versions connect in a context manager alone
        try:
            self._socket = self._connection.enter_context(
                client.connect(
                    address.geturl(),
                    additional_headers=headers,
                    open_timeout=timeout,
                    ping_timeout=timeout,  # a server that answers no ping while it computes is given as long
                    close_timeout=1,
                    max_size=LARGEST,
                    compression=None,
                    proxy=None,
                )
            )
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"The certificate of {address.geturl()} is not trusted ({error.verify_message}); if it is your own, "
                "let SSL_CERT_FILE name it."
            ) from error
        except self._errors.InvalidStatus as error:
            raise _refused(address, error.response.status_code) from error
        except (self._errors.InvalidHandshake, EOFError) as error:
            raise UserError(
                f"The endpoint {address.geturl()} is no policy server: expected a websocket, found something else "
                f"({reason_of(error)})."
            ) from error

    def send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except self._errors.ConnectionClosed as error:
            raise _lost(error) from error

    def receive(self) -> bytes | str:
        try:
            return self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None
        except self._errors.ConnectionClosed as error:
            raise _lost(error) from error

    def close(self) -> None:
        self._connection.close()


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line without its full stop."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _parse(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        raise UserError(f"'{url}' is no address ({error}); pass e.g. ws://127.0.0.1:8765.") from error
    if not host:
        raise UserError(f"'{url}' is no address; pass e.g. ws://127.0.0.1:8765.")
    if address.scheme not in SCHEMES:
        raise unknown_name("scheme", address.scheme, SCHEMES, f"in {url}")
    if address.username or address.password:
        raise UserError(f"An address holds no password, since it is stored; put the token into {TOKEN}.")
    return address


def _headers(address: SplitResult) -> dict[str, str]:
    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(address.hostname or ""):
        raise UserError(
            f"{address.hostname} is another machine, so the endpoint asks for a token; put it into {TOKEN}."
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _refused(address: SplitResult, status: int) -> Exception:
    url = address.geturl()
    if status >= 500:  # busy, or on its way up or down
        return ConnectionError(f"status {status}")
    if status in (401, 403):
        return UserError(f"The endpoint {url} refuses the token (status {status}); put the right one into {TOKEN}.")
    return UserError(f"The endpoint {url} answers with status {status}, expected a policy server; check the address.")


def _lost(closed: Any) -> Exception:
    if closed.rcvd is not None and closed.rcvd.code == 1009:
        return UserError(f"The message is larger than the endpoint takes ({closed.rcvd.reason or 'no reason given'}).")
    return ConnectionError("the connection was closed")


FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0  # [s] before a server that is gone is asked again, doubled each time


@dataclass(frozen=True)
class ClientConfig(Ranged):
    """How long to wait for a server, and what to tell it."""

    timeout: NotNegative = 5.0  # [s] for one answer
    patience: NotNegative = 10.0  # [s] for which a server that is gone or late is asked again; 0 gives up at once
    seed: Natural = 0  # of the noise; a chunk is a function of seed, observation and how many requests came before
    deadline: NotNegative = 0.0  # [s] after which an answer is of no use; without its turn it is an error; 0: none


class ServerSource:
    """Chunks of the policy that a server serves."""

    def __init__(self, url: str, config: ClientConfig | None = None) -> None:
        """Connect and learn what is served.

        Args:
            url: `ws://HOST:PORT` or `wss://HOST:PORT`; the token is read from the variable ROBOPOLICY_TOKEN.
            config: How patient to be.

        Raises:
            UserError: It cannot be reached in time, refuses, or is no policy server.
        """
        self.config = config or ClientConfig()
        self.round_trip = Latency()  # from observation to chunk, without attempts that failed
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connection = Connection(url, self.config.timeout, self._check)
        self._greeting: Greeting | None = None
        with self._lock:
            self._greeting = self._patiently(self._connection.open)

    @property
    def spec(self) -> PolicySpec:
        """What it takes and gives."""
        return self.greeting.spec

    @property
    def greeting(self) -> Greeting:
        """What the server said of its policy."""
        assert self._greeting is not None
        return self._greeting

    @property
    def takes_prefix(self) -> bool:
        """As the server says."""
        return self.greeting.prefix

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """The chunk `(H, A)` for one observation `{key: (To, ...)}`.

        Waits while the server is gone, up to `patience`; meanwhile the chunks in the robot's buffer run out, and it
        holds still.

        Raises:
            UserError: The observation does not fit, or the server is gone, refuses, or serves another policy now.
        """
        spec = self.spec
        missing = [key for key in spec.observation if key not in obs]
        if missing:
            raise UserError(f"The policy needs the observation '{missing[0]}', got {', '.join(sorted(obs))}.")
        fields: dict[str, Any] = {"obs": {key: np.asarray(obs[key])[None] for key in spec.observation}}
        if prefix is not None and len(prefix):
            fields["prefix"] = np.asarray(prefix)[None]
        fields |= {"seed": self.config.seed, "deadline": self.config.deadline or None}
        with self._lock:
            chunk = self._patiently(lambda: self._timed(fields))
        if chunk.shape != (1, spec.horizon, spec.action_dim):
            raise UserError(f"{self._label} returned shape {chunk.shape} in place of one chunk.")
        if not np.isfinite(chunk).all():
            raise UserError(f"{self._label} returned a non-finite action.")
        return chunk[0].astype(np.float32, copy=False)

    def statistics(self) -> dict[str, Any]:
        """How the server fares: requests, errors, latency, batches, deadlines missed."""
        with self._lock:
            return dict(self._patiently(lambda: self._connection.ask(stats=True)).stats)

    def close(self) -> None:
        """Close the connection; a call that waits for the server in another thread gives up."""
        self._closed.set()
        self._connection.close()

    @property
    def _label(self) -> str:
        return f"The endpoint {self._connection.url}"

    def _timed(self, fields: dict[str, Any]) -> NDArray[Any]:
        start = time.monotonic()
        chunk = self._connection.ask(**fields).chunk
        self.round_trip.add(time.monotonic() - start)
        return chunk

    def _patiently(self, attempt: Any) -> Any:
        """What `attempt` returns, tried again with doubling waits while the server is gone."""
        until, wait = time.monotonic() + self.config.patience, FIRST_WAIT
        while not self._closed.is_set():
            try:
                return attempt()
            except OSError as error:
                left = until - time.monotonic()
                if left <= 0:
                    raise UserError(
                        f"{self._label} cannot be reached ({reason_of(error)}); start it, or check the address."
                    ) from error
                self._closed.wait(min(wait, left))
                wait = min(2 * wait, LONGEST_WAIT)
        raise UserError(f"The connection to {self._connection.url} has been closed.")

    def _check(self, greeting: Greeting) -> None:
        """Refuse another policy than the one this robot began with."""
        if self._greeting is not None and greeting != self._greeting:
            raise UserError(f"{self._label} now serves another policy ('{greeting.model}'); stop and connect again.")
