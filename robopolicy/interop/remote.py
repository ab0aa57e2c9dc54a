"""A policy behind a websocket or HTTP address as a black box; the wire format is that of `wire.py`.

    policy = open_remote("ws://127.0.0.1:8765")
    steered = LatentPolicy.steer(policy, NoiseSpace(kind="repeat"), STEERING_ACTOR)

The connection is made when the first chunk is asked for, made again after a failure, and shared by copies. What an
endpoint serves must not change under a policy: its greeting is compared at every connection. An endpoint that cannot
be reached or is late is asked again, with doubling waits; one that refuses or talks nonsense is not.
"""

from __future__ import annotations

import http.client
import os
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

import numpy as np
from torch import Tensor

from robopolicy.deploy.wire import LARGEST, MEDIA_TYPE, TOKEN, Greeting, Reply, Request, WireError, is_loopback
from robopolicy.errors import UserError, unknown_name
from robopolicy.extras import need
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.wrappers.black_box import BlackBoxPolicy, PatientConfig

SCHEMES = ("ws", "wss", "http", "https")


@dataclass(frozen=True)
class RemoteConfig(PatientConfig):
    """Where the endpoint is and how long to wait for it; `open_remote` fills in what it serves."""

    timeout: float = 30.0
    retries: int = 2
    url: str = ""  # ws://HOST:PORT | wss://... | http://... | https://...
    model: str = ""  # what the endpoint called its policy; another name is refused, "" takes any


class RemotePolicy(BlackBoxPolicy):
    """A policy that another process or machine computes."""

    name: ClassVar[str] = "remote"
    config: RemoteConfig

    def __init__(self, config: RemoteConfig, spec: PolicySpec) -> None:
        """Check the address; nothing is sent yet.

        Raises:
            UserError: The address is none.
        """
        super().__init__(config, spec)
        self._endpoint = _Endpoint(config)

    @property
    def label(self) -> str:
        """By the address."""
        return f"The endpoint {self.config.url}"

    def answer(self, obs: Observation, noise: Tensor | None) -> Any:
        """Send one batch and wait for its chunk."""
        arrays = {key: value.cpu().numpy() for key, value in obs.items()}
        return self._endpoint.ask(self, arrays, None if noise is None else noise.cpu().numpy())

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._endpoint.close()


def open_remote(url: str, *, execute: int = 0, **settings: Any) -> RemotePolicy:
    """Ask the endpoint at `url` what it serves and wrap it.

    Args:
        url: Address, see `RemoteConfig.url`.
        execute: Actions played per chunk; 0 leaves it to the endpoint.
        **settings: Further fields of `RemoteConfig`.

    Raises:
        UserError: It cannot be reached, refuses, or is no policy server.
    """
    endpoint = _Endpoint(RemoteConfig(url=url, **settings))
    try:
        greeting = endpoint.open()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"The endpoint {url} cannot be reached ({_reason(error)}); start it, or check the address."
        ) from error
    except WireError as error:
        raise UserError(f"The endpoint {url} is no policy server: {error}.") from error
    finally:
        endpoint.close()
    spec = greeting.spec
    if execute:
        if execute > spec.horizon:
            raise UserError(
                f"The endpoint {url} gives chunks of {spec.horizon} actions, so execute={execute} is too many."
            )
        spec = replace(spec, execute=execute)
    known = {"noise": greeting.noise, "model": greeting.model, "network_calls": greeting.network_calls}
    return RemotePolicy(RemoteConfig(url=url, **(known | settings)), spec)


class _Endpoint:
    """The connection to one address; copies of a policy share it, threads take turns."""

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._address = _address(config.url)
        self._lock = threading.Lock()
        self._line: _Line | None = None
        self._number = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Endpoint:
        return self

    def open(self) -> Greeting:
        """Connect and return the greeting."""
        kind = _WebSocket if self._address.scheme in ("ws", "wss") else _Http
        self._line = kind(self._address, _headers(self._address), self.config.timeout or None)
        return Greeting.unpack(self._line.greeting())

    def ask(self, policy: RemotePolicy, obs: dict[str, np.ndarray], noise: np.ndarray | None) -> np.ndarray:
        """The chunk for one batch; the connection does not outlive a failure."""
        with self._lock:
            try:
                if self._line is None:
                    _check_greeting(policy, self.open())
                assert self._line is not None
                self._number += 1
                reply = Reply.unpack(self._line.exchange(Request(self._number, obs, noise).pack()))
                if reply.number != self._number:
                    raise WireError(f"expected the reply to request {self._number}, found one to {reply.number}")
            except WireError as error:
                self.close()
                raise UserError(f"{policy.label} returned no message of the wire format: {error}.") from error
            except BaseException:
                self.close()
                raise
        if reply.error:
            raise UserError(f"{policy.label} gave no chunk: {reply.error.splitlines()[0]}")
        return reply.chunk

    def close(self) -> None:
        """Close the connection, if there is one."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


class _Line(ABC):
    """One connection."""

    @abstractmethod
    def greeting(self) -> bytes | str:
        """The first message of the server."""

    @abstractmethod
    def exchange(self, request: bytes) -> bytes | str:
        """Send `request` and return its reply."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class _WebSocket(_Line):
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
        except self._errors.InvalidStatus as error:
            raise _refused(address, error.response.status_code) from error
        except (self._errors.InvalidHandshake, EOFError) as error:
            raise WireError(f"expected a websocket, found something else ({_reason(error)})") from error

    def greeting(self) -> bytes | str:
        return self._receive()

    def exchange(self, request: bytes) -> bytes | str:
        try:
            self._socket.send(request)
        except self._errors.ConnectionClosed as error:
            raise ConnectionError("the connection was closed") from error
        return self._receive()

    def close(self) -> None:
        self._connection.close()

    def _receive(self) -> bytes | str:
        try:
            return self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None
        except self._errors.ConnectionClosed as error:
            raise ConnectionError("the connection was closed") from error


class _Http(_Line):
    def __init__(self, address: SplitResult, headers: dict[str, str], timeout: float | None) -> None:
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(address.hostname or "", address.port, timeout=timeout)
        self._address, self._headers = address, headers | {"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE}
        self._timeout = timeout

    def greeting(self) -> bytes | str:
        return self._call("GET", None)

    def exchange(self, request: bytes) -> bytes | str:
        return self._call("POST", request)

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, body: bytes | None) -> bytes:
        target = (self._address.path or "/") + (f"?{self._address.query}" if self._address.query else "")
        try:
            self._connection.request(method, target, body, self._headers)
            response = self._connection.getresponse()
            data = response.read(LARGEST + 1)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None
        if response.status >= 500:
            raise ConnectionError(f"status {response.status} {response.reason}")
        if response.status != 200:
            raise _refused(self._address, response.status)
        return data


def _address(url: str) -> SplitResult:
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


def _check_greeting(policy: RemotePolicy, greeting: Greeting) -> None:
    """Refuse an endpoint that serves something else than when it was wrapped."""
    ours, theirs = (spec.to_dict() for spec in (policy.spec, greeting.spec))
    for key in ("observation", "action_dim", "horizon", "obs_horizon"):
        if ours[key] != theirs[key]:
            raise UserError(f"{policy.label} now has {key} {theirs[key]}, expected {ours[key]}; import it again.")
    if policy.config.noise and not greeting.noise:
        raise UserError(f"{policy.label} no longer takes noise; import it again.")
    if policy.config.model and greeting.model != policy.config.model:
        raise UserError(
            f"{policy.label} now serves '{greeting.model}', expected '{policy.config.model}'; import it again."
        )


def _refused(address: SplitResult, status: int) -> UserError:
    url = address.geturl()
    if status in (401, 403):
        return UserError(f"The endpoint {url} refuses the token (status {status}); put the right one into {TOKEN}.")
    return UserError(f"The endpoint {url} answers with status {status}, expected a policy server; check the address.")


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
