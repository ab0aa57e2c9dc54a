"""Websocket protocol of openpi, as its package `openpi-client` speaks it; for the server and for a client.

The server sends a map of metadata first. Every request is a flat map of one observation and the text `prompt`; the
reply is a map with `actions` `(H, A)`. Messages are MessagePack in binary frames, arrays are maps with the byte keys
`__ndarray__`, `dtype`, `shape` and `data`. An error is a text frame. The header `Authorization: Api-Key TOKEN` has the
token, and `GET /healthz` answers without one.

Our server names its observations and sizes in the metadata, accepts `seed` and `step`, which select the noise, and
accepts `noise` `(H, A)` if the metadata have `noise`. Without `step` it is the number of chunks since the last reset.
Servers of vLLM-Omni also answer with a bare array or one array per kind of action, and their errors are maps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.websocket import WebSocket, parse_address
from robopolicy.deploy.wire import MAX_SEED, Greeting, Reply, Request, WireError, array_from, brief, unpack
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.spec import IMAGE_PREFIX, PolicySpec

HEALTH_PATH = "/healthz"  # path of the health check
SCHEME = "Api-Key"  # of the header with the token
NAME_PREFIX = "observation/"
_DTYPES = re.compile(r"[<>=|]?[biuf][1248]")


def encode(message: Any) -> bytes:
    """Encode a message, which may contain arrays and numpy numbers."""
    return require("msgpack", "remote").packb(message, default=_as_map)


def decode(data: bytes | str) -> Any:
    """Decode a message, with new arrays; raises `WireError` for invalid messages and other types of arrays."""
    return unpack(data, _from_map)


def request_names(spec: PolicySpec, rename: Mapping[str, str]) -> dict[str, str]:
    """Return the name of every observation in requests.

    Without `rename`, `state` is `observation/state` and `image.front` is `observation/front`.

    Raises:
        UserError: `rename` has an unknown observation, or two observations have one name.
    """
    for key in rename:
        if key not in spec.observation:
            raise UserError(f"The policy observes {', '.join(spec.observation)}, not '{key}' of --rename {key}=NAME.")
    names = {key: rename.get(key) or NAME_PREFIX + key.removeprefix(IMAGE_PREFIX) for key in spec.observation}
    for key, name in names.items():
        other = next(found for found, same in names.items() if same == name)
        if other != key:
            raise UserError(f"'{other}' and '{key}' would both be '{name}'; rename one by --rename {key}=NAME.")
    return names


def image_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape `(h, w, 3)` in requests of our pictures `(3, h, w)`."""
    return *shape[1:], shape[0]


class OpenpiSession:
    """Requests and replies of one client of our server, with the history of its observations."""

    def __init__(self, greeting: Greeting, names: Mapping[str, str]) -> None:
        self._greeting, self._names = greeting, names  # our observation -> name in requests
        self._seen: dict[str, deque[NDArray[Any]]] = {}  # of requests that got a chunk
        self._next = self._seen  # with the current request
        self._chunks = 0  # since the start of the episode
        self.number = 0

    def greeting(self) -> bytes:
        """Return the metadata: names and shapes of the observations and sizes of the chunk."""
        spec = self._greeting.spec
        shapes = {
            self._names[key]: list(image_shape(shape) if key.startswith(IMAGE_PREFIX) else shape)
            for key, shape in spec.observation.items()
        }
        sizes = {name: getattr(spec, name) for name in ("obs_horizon", "action_dim", "horizon", "action_horizon")}
        known = {"model": self._greeting.model, "noise": self._greeting.noise}
        return encode({"protocol": "openpi", "observation": shapes, **sizes, **known})

    def read(self, data: bytes | str) -> Request | None:
        """Decode a request for one chunk; None for `endpoint` "reset", which starts an episode."""
        self.number += 1
        fields = decode(data)
        if not isinstance(fields, dict):
            raise WireError(f"expected a map, found {brief(fields)}")
        endpoint = fields.get("endpoint", "infer")
        if endpoint == "reset":
            self._seen, self._chunks = {}, 0
            return None
        if endpoint != "infer":
            raise WireError(f"expected the endpoint 'infer' or 'reset', found {brief(endpoint)}")
        if not isinstance(fields.get("prompt", ""), str):
            raise WireError(f"expected 'prompt' as text, found {brief(fields['prompt'])}")
        values = {key: self._value(key, shape, fields) for key, shape in self._greeting.spec.observation.items()}
        noise, seed, step = fields.get("noise"), fields.get("seed"), fields.get("step", self._chunks)
        for name, number in (("seed", 0 if seed is None else seed), ("step", step)):
            if type(number) is not int or not 0 <= number <= MAX_SEED:
                raise WireError(f"expected '{name}' as an integer in [0, {MAX_SEED}], found {brief(number)}")
        noise = None if noise is None else _numbers("noise", noise)[None]
        self._next = {key: seen.copy() for key, seen in self._seen.items()}  # a rejected request leaves no trace
        obs = {key: self._history(key, value) for key, value in values.items()}
        return Request(self.number, obs, noise=noise, streams=None if seed is None else np.array([[seed, step]]))

    def write(self, reply: Reply) -> bytes | str:
        """Encode a reply: an error as one line of text."""
        if reply.error:
            return reply.error
        if not reply.chunk.size:
            return encode({"status": "reset successful"})
        self._seen, self._chunks = self._next, self._chunks + 1
        timing = {"infer_ms": 1e3 * reply.seconds}
        return encode({"actions": reply.chunk[0].astype(np.float32, copy=False), "server_timing": timing})

    def _value(self, key: str, shape: tuple[int, ...], fields: Mapping[Any, Any]) -> NDArray[Any]:
        """Observation of a request: its history `(To, ...)`, or the newest value `(...)`."""
        name, steps = self._names[key], self._greeting.spec.obs_horizon
        if name not in fields:
            known = ", ".join(f"'{each}'" for each in self._names.values())
            raise WireError(f"expected {known}, found no '{name}'")
        value = _numbers(name, fields[name])
        if key.startswith(IMAGE_PREFIX):
            value = _picture(name, value, shape)
        if value.shape not in (shape, (steps, *shape)):
            raise WireError(f"expected '{name}' of shape {shape}, found {value.shape}")
        if not np.isfinite(value).all():
            raise WireError(f"expected finite numbers in '{name}'")
        return value

    def _history(self, key: str, value: NDArray[Any]) -> NDArray[Any]:
        """History `(1, To, ...)` of an observation: given by the request, or of this and earlier requests."""
        steps = self._greeting.spec.obs_horizon
        if value.ndim > len(self._greeting.spec.observation[key]):
            return value[None]
        seen = self._next.setdefault(key, deque(maxlen=steps))
        seen.extend([value] * (1 if seen else steps))
        return np.stack(list(seen))[None]


class OpenpiConnection:
    """Connection to a server of openpi or vLLM-Omni; temporary failures raise `OSError`."""

    def __init__(self, url: str, timeout: float) -> None:
        """Check the address without connecting; `timeout` of a reply [s], 0 for none.

        Raises:
            UserError: The address is invalid.
        """
        self._address = parse_address(url)
        self.url, self._timeout = url, timeout or None
        self._socket: WebSocket | None = None
        self._needs_session = False

    def open(self) -> dict[str, Any]:
        """Connect and return the metadata.

        Raises:
            UserError: The server rejects the client, or does not speak this protocol.
            OSError: The server cannot be reached or does not respond in time.
        """
        self.close()
        self._socket = WebSocket(self._address, self._timeout, SCHEME)
        try:
            metadata = self._receive()
        except BaseException:
            self.close()
            raise
        if not isinstance(metadata, dict):
            raise UserError(f"The endpoint {self.url} is no openpi server: expected a map, found {brief(metadata)}.")
        self._needs_session = metadata.get("needs_session_id") is True
        return metadata

    def infer(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return its reply.

        Raises:
            UserError: The reply is an error or no message of the protocol.
            OSError: As in `open`, or the connection is lost.
        """
        if self._socket is None:
            self.open()
        assert self._socket is not None
        session = {"session_id": uuid4().hex} if self._needs_session else {}  # rows of a batch are independent
        try:
            self._socket.send(encode({**request, **session}))
            return self._receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def _receive(self) -> Any:
        assert self._socket is not None
        data = self._socket.receive()
        if isinstance(data, str):  # a traceback, whose last line is the error
            raise self._failed(data)
        try:
            message = decode(data)
        except WireError as error:
            raise UserError(f"The endpoint {self.url} returned no message of openpi: {error}.") from error
        if isinstance(message, dict) and message.get("type") == "error":
            raise self._failed(str(message.get("message", "")))
        return message

    def _failed(self, text: str) -> UserError:
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
        return UserError(f"The endpoint {self.url} returned no chunk: {lines[-1][:500]}")


def _as_map(value: Any) -> dict[bytes, Any]:
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    if not isinstance(value, np.ndarray) or not _DTYPES.fullmatch(value.dtype.str):
        raise TypeError(f"A message cannot contain {getattr(value, 'dtype', type(value).__name__)}.")
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": list(value.shape),
    }


def _from_map(fields: dict[Any, Any]) -> Any:
    if b"__npgeneric__" in fields:
        value = fields.get(b"data")
        if not isinstance(value, (bool, int, float)):
            raise WireError(f"expected a number, found {brief(value)}")
        return value
    if b"__ndarray__" not in fields:
        return fields
    dtype = fields.get(b"dtype")
    if fields[b"__ndarray__"] is not True or not isinstance(dtype, str) or not _DTYPES.fullmatch(dtype):
        raise WireError(f"expected an array of numbers, found {brief(dtype)}")
    try:
        np.dtype(dtype)
    except TypeError:
        raise WireError(f"expected an array of numbers, found {brief(dtype)}") from None
    found = array_from(dtype, fields.get(b"shape"), fields.get(b"data"))
    return found.astype(found.dtype.newbyteorder("<"), copy=False)


def _numbers(name: str, value: Any) -> NDArray[Any]:
    """An entry of a request as an array, which may also be a number or a list of them."""
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise WireError(f"expected numbers in '{name}', found {brief(value)}")
    return found


def _picture(name: str, value: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Pictures `(..., h, w, 3)` or `(..., 3, h, w)` as bytes `(..., 3, h, w)`; floats lie in [0, 1], as in openpi."""
    if value.shape[-3:] == image_shape(shape):
        value = np.moveaxis(value, -1, -3)
    elif value.shape[-3:] != shape:
        expected = image_shape(shape)
        raise WireError(f"expected '{name}' of shape {expected}, found {value.shape}; resize it on the client")
    if value.dtype.kind != "f":
        return value
    if not bool(((value >= 0) & (value <= 1)).all()):
        raise WireError(f"expected '{name}' as bytes, or as numbers in [0, 1], found others")
    return (255 * value).astype(np.uint8)
