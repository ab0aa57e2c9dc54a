"""Wire format between a policy server and its clients.

Every message is a MessagePack map of numbers, strings, booleans, lists, maps, nil and arrays, so that decoding cannot
run code (the package msgpack-numpy would unpickle arrays of objects). An array is a map with exactly three entries:
`dtype` (one of `DTYPES`, little endian), `shape` (a list) and `data` (raw bytes, C order).

1. The server sends one `Greeting` with its protocol version and the specification of its policy.
2. The client sends a `Request`: a number, observations `{key: (B, To, ...)}` and, if the greeting allows it, noise
   `(B, H, A)` or a prefix `(B, d, A)` to continue. It may contain a deadline and the random stream of every row, or
   request statistics of the server.
3. The server sends a `Reply` with the same number: a chunk `(B, H, A)` in action units and the compute time, or an
   error of one line. It reads the next request of a connection after the reply.

Each message is one binary frame of a websocket (`ws://`, `wss://`). The header `Authorization: Bearer TOKEN` of the
handshake contains the token, which only loopback addresses do not need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.optional import require
from robopolicy.spec import PolicySpec

PROTOCOL = 3  # version, to increase with every incompatible change
MAX_MESSAGE_BYTES = 256 * 2**20
MAX_PARTS, MAX_ENTRIES = 4096, 1024  # lists and maps in a message, and entries of each; few bytes can encode many
MAX_NUMBER, MAX_SEED = 2**48 - 1, 2**63 - 1
DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f2", "<f4", "<f8")


class WireError(ValueError):
    """Error of an invalid message, with what was expected and found."""


@dataclass(frozen=True)
class Greeting:
    """First message of a server, with the specification of its policy."""

    spec: PolicySpec  # observations, action dimensions and horizons
    model: str = ""  # name or content hash, by which a client detects another policy
    noise: bool = False  # accepts noise and is then deterministic
    prefix: bool = False  # accepts a prefix of actions to continue
    network_calls: int = 1  # network evaluations per chunk
    max_rows: int = 32  # maximum number of observations per request

    def pack(self) -> bytes:
        """The message."""
        return encode({"protocol": PROTOCOL, **_fields(self), "spec": self.spec.to_dict()})

    @classmethod
    def unpack(cls, data: bytes | str) -> Greeting:
        """Decode a message; raises `WireError` for invalid messages and other protocols."""
        fields = decode(data)
        if fields.get("protocol") != PROTOCOL:
            raise WireError(f"expected a greeting of protocol {PROTOCOL}, found {brief(fields.get('protocol'))}")
        spec = _entry(fields, "spec", dict)
        try:
            described = PolicySpec.from_dict(spec)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"expected a policy specification, found {brief(spec)}") from error
        counts = {key: _entry(fields, key, int) for key in ("network_calls", "max_rows")}
        for key, number in counts.items():
            if number < 1:
                raise WireError(f"expected '{key}' of at least 1, found {number}")
        flags = _entry(fields, "noise", bool), _entry(fields, "prefix", bool)
        return cls(described, _entry(fields, "model", str), *flags, **counts)


@dataclass(frozen=True)
class Request:
    """Request of chunks for a batch of observations."""

    number: int  # increasing within a connection
    obs: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])  # {key: (B, To, ...)}
    noise: NDArray[Any] | None = None  # (B, H, A)
    prefix: NDArray[Any] | None = None  # (B, d, A), d < H
    streams: NDArray[Any] | None = None  # (B, 2) int64, seed and step of the noise of every row; None: the server's
    deadline: float | None = None  # [s] until the reply is late; late replies are counted
    stats: bool = False  # request statistics only; other fields are ignored

    def pack(self) -> bytes:
        """The message."""
        return encode(_fields(self))

    @classmethod
    def unpack(cls, data: bytes | str) -> Request:
        """Decode a message; raises `WireError` for invalid messages."""
        return cls.read(decode(data))

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Request:
        """Read a decoded message; raises `WireError` for invalid messages."""
        obs = {str(key): _array(value, str(key)) for key, value in _entry(fields, "obs", dict).items()}
        noise, prefix = (_optional(fields, key, np.ndarray) for key in ("noise", "prefix"))
        number, streams = _entry(fields, "number", int), _optional(fields, "streams", np.ndarray)
        if not 0 <= number <= MAX_NUMBER:
            raise WireError(f"expected 'number' in [0, {MAX_NUMBER}], found {number}")
        deadline = _optional(fields, "deadline", float)
        if deadline is not None and not 0 < deadline < math.inf:
            raise WireError(f"expected 'deadline' of more than 0 s, found {deadline:g}")
        return cls(number, obs, noise, prefix, streams, deadline, _entry(fields, "stats", bool))


@dataclass(frozen=True)
class Reply:
    """Reply with a chunk or an error."""

    number: int  # number of the request; 0 if it had none
    chunk: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))  # (B, H, A)
    seconds: float = 0.0  # compute time
    error: str = ""  # one line; the chunk is then empty
    stats: Mapping[str, Any] = field(default_factory=dict[str, Any])  # numbers by name, if requested

    def pack(self) -> bytes:
        """The message."""
        return encode(_fields(self))

    @classmethod
    def unpack(cls, data: bytes | str) -> Reply:
        """Decode a message; raises `WireError` for invalid messages."""
        fields = decode(data)
        chunk = _array(fields.get("chunk"), "chunk")
        number, seconds = _entry(fields, "number", int), _entry(fields, "seconds", float)
        return cls(number, chunk, seconds, _entry(fields, "error", str), _entry(fields, "stats", dict))


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message, which may contain arrays."""
    return require("msgpack", "remote").packb(dict(message), default=_as_map)


def decode(data: bytes | str) -> dict[str, Any]:
    """Decode a message, with new arrays; raises `WireError` if `data` is invalid or too large."""
    message = unpack(data, _from_map)
    if not isinstance(message, dict):
        raise WireError(f"expected a map, found {brief(message)}")
    return message


def unpack(data: bytes | str, convert: Callable[[dict[Any, Any]], Any]) -> Any:
    """Decode MessagePack of bounded size; `convert` replaces every map, the inner ones first.

    Raises:
        WireError: `data` is text, is not MessagePack, or exceeds a limit.
    """
    if not isinstance(data, bytes):
        raise WireError(f"expected a binary message, found the text {brief(data)}")
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"expected at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}")
    msgpack, parts = require("msgpack", "remote"), count()

    def counted(part: Any) -> Any:
        if next(parts) >= MAX_PARTS:
            raise WireError(f"expected at most {MAX_PARTS} lists and maps, found more")
        return convert(part) if isinstance(part, dict) else part

    limits = {"max_array_len": MAX_ENTRIES, "max_map_len": MAX_ENTRIES, "max_ext_len": 0}
    try:
        return msgpack.unpackb(data, object_hook=counted, list_hook=counted, strict_map_key=True, **limits)
    except WireError:
        raise
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"expected MessagePack, found {brief(data)}") from error


def array_from(dtype: str, shape: Any, data: Any) -> NDArray[Any]:
    """Copy the array of an accepted `dtype` out of a message; raises `WireError` if shape and bytes do not fit."""
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 16:
        raise WireError(f"expected the shape of an array, found {brief(shape)}")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not isinstance(data, bytes) or len(data) != size:
        found = len(data) if isinstance(data, bytes) else brief(data)
        raise WireError(f"expected {size} bytes for an array of shape {tuple(shape)}, found {found}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _as_map(value: Any) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"A message cannot contain {type(value).__name__}.")
    array = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in DTYPES:
        raise TypeError(f"A message cannot contain arrays of {array.dtype}.")
    return {"dtype": array.dtype.str, "shape": list(value.shape), "data": array.tobytes()}


def _from_map(fields: dict[Any, Any]) -> Any:
    if fields.keys() != {"dtype", "shape", "data"}:
        return fields
    if fields["dtype"] not in DTYPES:
        raise WireError(f"expected an array of one of {', '.join(DTYPES)}, found {brief(fields['dtype'])}")
    return array_from(**fields)


def _fields(message: Any) -> dict[str, Any]:
    return {entry.name: getattr(message, entry.name) for entry in fields_of(message)}


def _entry(fields: Mapping[str, Any], key: str, kind: type) -> Any:
    value = fields.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WireError(f"expected '{key}' of type {kind.__name__}, found {brief(value)}")
    return value


def _optional(fields: Mapping[str, Any], key: str, kind: type) -> Any:
    if fields.get(key) is None:
        return None
    return _array(fields[key], key) if kind is np.ndarray else _entry(fields, key, kind)


def _array(value: Any, key: str) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise WireError(f"expected an array '{key}', found {brief(value)}")
    return value


def brief(value: Any) -> str:
    """Shorten the representation of a value, for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
