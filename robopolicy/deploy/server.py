"""Chunk server: one policy for many robots or evaluations, over websockets in the format of `wire.py`.

    with running(served, ServerConfig(port=0)) as server:
        source = ServerChunkPolicy(server.url)

It listens on the loopback address unless a token is set. Clients are isolated: each has one request in progress,
messages are limited in size, time and number of objects, and errors are replies of one line. Received data is not
unpickled or executed. Web pages are rejected, since a local browser could reach a server without a token.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from robopolicy.deploy.batching import BatchedPolicy, Batcher, check_request
from robopolicy.deploy.openpi import HEALTH_PATH, OpenpiSession, request_names
from robopolicy.deploy.statistics import ServerStatistics
from robopolicy.deploy.wire import MAX_MESSAGE_BYTES, Greeting, Reply, Request, WireError, decode
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.shutdown import stop_signals
from robopolicy.spec import IMAGE_PREFIX
from robopolicy.tokens import SERVER_TOKEN, is_loopback

Log = Callable[[str], None]
T = TypeVar("T")
_DRAIN_TIMEOUT = 5.0  # [s] for pending requests when the server stops
MIN_ROWS = 32  # observations that a request may have even if `max_batch` is smaller
MESSAGE_OVERHEAD = 64 * 1024  # bytes of a request in addition to its numbers


@dataclass(frozen=True)
class ServerConfig:
    """Address, authentication and batching of a server."""

    host: str = "127.0.0.1"  # listening address; addresses beyond loopback require a token
    port: int = 8765  # 0 for a free port
    openpi_port: int | None = None  # port for clients of openpi; 0 for a free one, None for none
    openpi_names: Mapping[str, str] = field(default_factory=dict[str, str])  # our observation -> name in its requests
    token: str = field(default="", repr=False)  # required token; "" for none
    tls_cert: Path | None = None  # PEM file with the certificate and its chain; None for plain ws://
    tls_key: Path | None = None  # PEM file with the private key
    max_batch: int = 32  # maximum number of observations per call
    window: float = 0.002  # [s] maximum batching delay
    max_bytes: int = 64 * 2**20  # maximum size of a message
    max_clients: int = 64
    open_timeout: float = 5.0  # [s] timeout of a handshake
    ping: float = 20.0  # [s] between pings, and timeout of a ping; silent clients are disconnected
    log_every: float = 60.0  # [s] between lines of statistics; 0 for none

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            text = "can be reached from other machines, so the server needs a token"
            raise UserError(f"{self.host} {text}; set {SERVER_TOKEN}, or listen on 127.0.0.1.")
        if not self.token.isascii() or any(letter.isspace() for letter in self.token):
            raise UserError("A token must consist of ASCII letters, digits and punctuation, without spaces.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("TLS needs both a certificate and its key; pass --tls-cert and --tls-key.")
        for port in (self.port, self.openpi_port or 0):
            if not 0 <= port < 2**16:
                raise UserError(f"A port must lie in [0, 65535], got {port}.")
        if min(self.max_batch, self.max_clients) < 1 or not 1024 <= self.max_bytes <= MAX_MESSAGE_BYTES:
            raise UserError(
                f"A server needs max_batch >= 1, max_clients >= 1 and max_bytes in [1024, {MAX_MESSAGE_BYTES}], got "
                f"{self.max_batch}, {self.max_clients} and {self.max_bytes}."
            )
        times = self.window, self.log_every, self.open_timeout, self.ping
        if not all(0 <= seconds < np.inf for seconds in times) or 0 in times[2:]:
            text = "The times of a server must be finite and not negative; handshake and ping times must be positive."
            raise UserError(text)


class Session(Protocol):
    """Messages of one client in its protocol."""

    number: int  # number of the last request

    def greeting(self) -> bytes:
        """Return the first message."""
        ...

    def read(self, data: bytes | str) -> Request | None:
        """Decode a request; None if there is nothing to compute. Raises `WireError` or `UserError`."""
        ...

    def write(self, reply: Reply) -> bytes | str:
        """Encode the reply to the last request."""
        ...


class WireSession:
    """Messages in the format of `wire.py`."""

    def __init__(self, greeting: Greeting) -> None:
        self._greeting = greeting
        self.number = 0

    def greeting(self) -> bytes:
        """Return the greeting."""
        return self._greeting.pack()

    def read(self, data: bytes | str) -> Request:
        """Decode a request."""
        self.number = 0
        fields = decode(data)
        found = fields.get("number")
        self.number = found if type(found) is int and 0 <= found < 2**63 else 0
        return Request.read(fields)

    def write(self, reply: Reply) -> bytes:
        """Encode a reply."""
        return reply.pack()


class ChunkServer:
    """Server of one policy for our clients and, on another port, clients of openpi."""

    def __init__(self, served: BatchedPolicy, config: ServerConfig, log: Log = lambda _: None) -> None:
        """Load the certificate and test the policy; raises `UserError` if either fails."""
        self.config, self.url, self.openpi_url = config, "", ""
        self.stopped_cleanly = True  # False after `run` if the policy still computes
        self.statistics = ServerStatistics()
        self._greeting, self._log = replace(served.greeting, max_rows=max(config.max_batch, MIN_ROWS)), log
        self._names = request_names(served.greeting.spec, config.openpi_names)
        self._tls = _tls(config)
        times = {rows: _seconds(served, rows) for rows in {1, min(4, config.max_batch)}}
        self._batcher = Batcher(served, self.statistics, max_batch=config.max_batch, window=config.window, times=times)
        self._seeds = itertools.count()  # for clients without a seed
        self._working = 0
        self._stopping = asyncio.Event()

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`; then finish pending requests and close.

        Args:
            ready: Called once the server listens and `url` is set.

        Raises:
            UserError: The address cannot be opened.
        """
        require("msgpack", "remote")  # raises an error for a missing package now
        logging.getLogger("robopolicy.server").disabled = True  # failed handshakes are counted, without a traceback
        config, greeting = self.config, self._greeting
        listening: list[Any] = []
        reports = asyncio.create_task(self._report())
        try:
            first, self.url = await self._listen(config.port, self._admit, lambda: WireSession(greeting))
            listening.append(first)
            if config.openpi_port is not None:
                second, self.openpi_url = await self._listen(
                    config.openpi_port, self._admit_openpi, lambda: OpenpiSession(greeting, self._names)
                )
                listening.append(second)
            ready()
            await self._stopping.wait()
        finally:
            reports.cancel()
            for each in listening:
                each.close(close_connections=False)
            until = time.monotonic() + _DRAIN_TIMEOUT
            while self._working and time.monotonic() < until:
                await asyncio.sleep(0.01)
            clients = [connection for each in listening for connection in each.connections]
            await asyncio.gather(*(connection.close(1001, "the server stops") for connection in clients))
            with suppress(TimeoutError):  # the tasks of clients hang with a policy
                await asyncio.wait_for(asyncio.gather(*(each.wait_closed() for each in listening)), 1.0)
            self.stopped_cleanly = self._batcher.close()

    def stop(self) -> None:
        """End `run`; call it in the event loop of `run`."""
        self._stopping.set()

    async def _listen(self, port: int, admit: Any, session: Callable[[], Session]) -> tuple[Any, str]:
        """Listen on a port; return the server of websockets and its address."""
        websockets, config = require("websockets.asyncio.server", "remote"), self.config
        options: dict[str, Any] = {
            "origins": [None],  # browsers always send an origin and are rejected
            "process_request": admit,
            "ssl": self._tls,
            "compression": None,
            "max_size": min(config.max_bytes, _request_bytes(self._greeting)),
            "max_queue": 1,  # maximum number of unread requests
            "open_timeout": config.open_timeout,
            "ping_interval": config.ping,
            "ping_timeout": config.ping,
            "close_timeout": 1,
            "logger": logging.getLogger("robopolicy.server"),
            **({"ssl_handshake_timeout": config.open_timeout} if self._tls else {}),
        }
        try:
            server = await websockets.serve(
                lambda connection: self._client(connection, session()), config.host, port, **options
            )
        except OSError as error:
            reason = error.strerror or str(error)
            text = f"Cannot listen on {config.host}:{port} ({reason}); pass another address or port."
            raise UserError(text) from error
        scheme, host = "wss" if self._tls else "ws", f"[{config.host}]" if ":" in config.host else config.host
        return server, f"{scheme}://{host}:{next(iter(server.sockets)).getsockname()[1]}"

    def _admit_openpi(self, connection: Any, request: Any) -> Any:
        """Answer a health check; otherwise as `_admit`."""
        if request.path == HEALTH_PATH:
            return connection.respond(HTTPStatus.OK, "OK\n")
        return self._admit(connection, request, "Api-Key")

    def _admit(self, connection: Any, request: Any, scheme: str = "Bearer") -> Any:
        """Return None to accept a client, else an error response."""
        tokens = request.headers.get_all("Authorization")
        expected = f"{scheme} {self.config.token}".encode()
        if self.config.token and not (
            len(tokens) == 1 and hmac.compare_digest(tokens[0].encode("utf-8", "surrogateescape"), expected)
        ):
            self.statistics.refused_clients += 1
            return connection.respond(HTTPStatus.UNAUTHORIZED, "The token is wrong.\n")
        if self.statistics.clients >= self.config.max_clients or self._stopping.is_set():
            self.statistics.refused_clients += 1
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "Too many clients.\n")
        return None

    async def _client(self, connection: Any, session: Session) -> None:
        closed = require("websockets.exceptions", "remote").ConnectionClosed
        seed = next(self._seeds)
        self.statistics.clients += 1
        gone = asyncio.create_task(connection.wait_closed())
        try:
            await connection.send(session.greeting())
            async for data in connection:
                self._working += 1
                try:
                    await connection.send(await self._answer(data, session, seed, gone))
                finally:
                    self._working -= 1
                if self._stopping.is_set():
                    break
        except (closed, asyncio.CancelledError):  # also while the policy computed
            pass
        finally:
            self.statistics.clients -= 1

    async def _answer(self, data: bytes | str, session: Session, seed: int, gone: asyncio.Task[Any]) -> bytes | str:
        """Reply to a message; it is cancelled when the client is gone, and then leaves the queue of the policy."""
        start, deadline = time.monotonic(), None
        try:
            request = session.read(data)
            if request is None:
                return session.write(Reply(session.number))
            if request.stats:
                return session.write(Reply(session.number, stats=self.statistics.to_dict()))
            deadline = request.deadline
            chunk = await _unless(gone, self._batcher.submit(check_request(request, self._greeting, seed)))
            reply = Reply(session.number, chunk, time.monotonic() - start)
        except (WireError, UserError) as error:
            reply = Reply(session.number, error=_line(str(error)), seconds=time.monotonic() - start)
        except Exception as error:
            text = _line(f"{type(error).__name__}: {error}")
            reply = Reply(session.number, error=text, seconds=time.monotonic() - start)
            self._log(f"the policy failed: {reply.error}")
        self.statistics.record_reply(reply.seconds, deadline, failed=bool(reply.error))
        return session.write(reply)

    async def _report(self) -> None:
        while self.config.log_every:
            await asyncio.sleep(self.config.log_every)
            self._log(self.statistics.line())


async def _unless(gone: asyncio.Task[Any], result: Future[T]) -> T:
    """Return the result, or cancel it and this call once `gone` is done."""
    future = asyncio.wrap_future(result)

    def cancel(_: asyncio.Task[Any]) -> None:
        future.cancel()

    gone.add_done_callback(cancel)
    try:
        return await future
    finally:
        gone.remove_done_callback(cancel)


def serve(served: BatchedPolicy, config: ServerConfig, log: Log, ready: Callable[[ChunkServer], None]) -> bool:
    """Serve in the main thread until one of `stop_signals`; raises the errors of `ChunkServer`.

    Returns:
        Whether the policy has ended. If not, its thread would abort the exit of the interpreter; use `os._exit`.
    """

    async def main() -> bool:
        server = ChunkServer(served, config, log)
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        await server.run(lambda: ready(server))
        log(server.statistics.line())
        return server.stopped_cleanly

    return asyncio.run(main())


@contextmanager
def running(
    served: BatchedPolicy, config: ServerConfig | None = None, log: Log = lambda _: None
) -> Iterator[ChunkServer]:
    """Run a server in a background thread, for notebooks and tests; raises the errors of `serve`."""
    server = ChunkServer(served, config or ServerConfig(port=0), log)
    listening, loops, failures = threading.Event(), [], []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            await server.run(listening.set)
        except Exception as error:
            failures.append(error)
        finally:
            listening.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server", daemon=True)
    thread.start()
    listening.wait()
    try:
        if failures:
            raise failures[0]
        yield server
    finally:
        with suppress(RuntimeError):  # its loop has ended
            loops[0].call_soon_threadsafe(server.stop)
        thread.join()


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")  # no prompt on the terminal
    except (OSError, ValueError) as error:
        files = f"{config.tls_cert} and {config.tls_key}"
        raise UserError(f"{files} are not PEM files of a certificate and its key: {_line(str(error))}.") from error
    return context


def _seconds(served: BatchedPolicy, rows: int) -> float:
    """Compute chunks of `rows` observations, to warm up and test the policy; return the time of a call [s]."""
    spec, seconds = served.greeting.spec, list[float]()
    obs = {
        key: np.zeros((rows, spec.obs_horizon, *shape), np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32)
        for key, shape in spec.observation.items()
    }
    expected = rows, spec.horizon, spec.action_dim
    noise = np.zeros(expected, np.float32) if served.greeting.noise else None
    for _ in range(3):  # the first call is slower
        start = time.monotonic()
        found = np.shape(served.chunks(obs, noise, None, [(0, row) for row in range(rows)]))
        seconds.append(time.monotonic() - start)
        if found != expected:
            raise UserError(f"The policy returned shape {found} instead of chunks of shape {expected}.")
    return min(seconds)


def _request_bytes(greeting: Greeting) -> int:
    """Size of the largest valid request: all numbers in eight bytes, pixels in one."""
    spec = greeting.spec
    row = 2 * 8 * spec.horizon * spec.action_dim  # noise and prefix
    for key, shape in spec.observation.items():
        row += spec.obs_horizon * math.prod(shape) * (1 if key.startswith(IMAGE_PREFIX) else 8)
    return greeting.max_rows * row + MESSAGE_OVERHEAD


def _line(text: str) -> str:
    return (text.splitlines() or ["unknown"])[0][:500]
