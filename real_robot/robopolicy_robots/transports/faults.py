"""Transport wrapper that injects faults into messages, for tests.

Each topic has a seeded generator of faults, so that runs can be repeated. Faults may be changed during a run
(`transport.faults = Faults(drop=1.0)`). Delayed messages are sent at the next use of their topic.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from robopolicy_robots.codecs import CodecError, cdr
from robopolicy_robots.message import Message
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport
from robopolicy_robots.transports.wrapped import WrappedPublisher, WrappedSubscription, WrappedTransport


@dataclass(frozen=True)
class Faults:
    """Faults, as probabilities per message unless stated otherwise."""

    drop: float = 0.0  # lost
    delay: float = 0.0  # [s] delay of every message
    jitter: float = 0.0  # [s] maximum additional delay; messages may be reordered
    duplicate: float = 0.0  # arrives twice
    reorder: float = 0.0  # arrives after the next one
    corrupt: float = 0.0  # one flipped bit
    nan: float = 0.0  # one number of an array replaced by NaN
    freeze: bool = False  # content and stamp are constant, while messages keep arriving
    topics: tuple[str, ...] = ()  # affected topics; all if empty


_DRAWN = ("drop", "jitter", "duplicate", "reorder", "corrupt", "nan")


class _Stream:
    """Messages of one topic in one direction."""

    def __init__(self, transport: FaultTransport, topic: str, clock: Callable[[], float]) -> None:
        self._transport, self._topic, self._clock = transport, topic, clock
        self._generator = np.random.default_rng([transport.seed, zlib.crc32(topic.encode())])
        self._delayed: list[tuple[float, int, Message, Any]] = []  # due time [s], number, message, extra data
        self._waiting: tuple[Message, Any] | None = None  # message to send after the next one
        self._frozen: Message | None = None
        self._number = 0

    def put(self, message: Message, extra: Any = None) -> int:
        """Add a message.

        Returns:
            1 if it was corrupted and can no longer be read, else 0.
        """
        faults = self._transport.faults
        if faults.topics and self._topic not in faults.topics:
            faults = Faults()
        draws = dict(zip(_DRAWN, self._generator.random(len(_DRAWN)), strict=True))
        happens = {name: draw < getattr(faults, name) for name, draw in draws.items() if name != "jitter"}
        self._frozen = (self._frozen or message) if faults.freeze else None
        if happens["drop"]:
            return 0
        message = self._frozen or message
        if happens["nan"]:
            message = _with_nan(message, self._generator)
        if happens["corrupt"]:
            try:
                message = _with_flipped_bit(message, self._generator)
            except CodecError:
                return 1
        until = self._clock() + faults.delay + faults.jitter * draws["jitter"]
        if happens["reorder"] and self._waiting is None:
            self._waiting = message, extra
            return 0
        for _ in range(2 if happens["duplicate"] else 1):
            self._hold(until, message, extra)
        if self._waiting is not None:
            self._hold(math.nextafter(until, math.inf), *self._waiting)
            self._waiting = None
        return 0

    def due(self) -> list[tuple[float, Message, Any]]:
        """Return due messages with their times, in order."""
        now = self._clock()
        due = sorted((each for each in self._delayed if each[0] <= now), key=lambda each: each[:2])
        self._delayed = [each for each in self._delayed if each[0] > now]
        return [(until, message, extra) for until, _, message, extra in due]

    def _hold(self, until: float, message: Message, extra: Any) -> None:
        self._number += 1
        self._delayed.append((until, self._number, message, extra))


class FaultPublisher(WrappedPublisher[M]):
    """Publisher with faults."""

    def __init__(self, inner: Publisher[M], stream: _Stream) -> None:
        super().__init__(inner)
        self._stream = stream

    def _send(self, message: M) -> None:
        self._stream.put(message)
        for _, each, _ in self._stream.due():
            self._inner.publish(each)  # type: ignore[arg-type]


class FaultSubscription(WrappedSubscription[M]):
    """Subscription with faults."""

    def __init__(self, inner: Subscription[M], stream: _Stream) -> None:
        super().__init__(inner)
        self._stream = stream
        self._unreadable = 0  # corrupted messages that cannot be decoded

    def _arrived(self) -> list[Arrival]:
        for each in self._inner.unread():
            self._unreadable += self._stream.put(each.message, each)
        self.malformed = self._inner.malformed + self._unreadable
        return [Arrival(message, until, origin.publisher) for until, message, origin in self._stream.due()]


class FaultTransport(WrappedTransport):
    """Transport wrapper with faults; closing it also closes `inner`."""

    def __init__(
        self, inner: Transport, faults: Faults, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.faults, self.seed, self._clock = faults, seed, clock

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> FaultPublisher[M]:
        return FaultPublisher(self._inner.advertise(topic, kind, qos), _Stream(self, topic, self._clock))

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> FaultSubscription[M]:
        return FaultSubscription(self._inner.subscribe(topic, kind, qos), _Stream(self, topic, self._clock))


def _with_nan(message: Message, generator: np.random.Generator) -> Message:
    """`message` with NaN in one of its arrays; unchanged without arrays."""
    arrays = {name: value for name, value in vars(message).items() if _floats(value)}
    if not arrays:
        for name, value in vars(message).items():  # such as the points of a trajectory
            if isinstance(value, tuple) and value and isinstance(value[0], Message):
                return replace(message, **{name: (_with_nan(value[0], generator), *value[1:])})  # type: ignore[type-var]
        return message
    name = sorted(arrays)[generator.integers(len(arrays))]
    values = arrays[name].copy()
    values[generator.integers(len(values))] = np.nan
    return replace(message, **{name: values})  # type: ignore[type-var]


def _floats(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and len(value) > 0


def _with_flipped_bit(message: Message, generator: np.random.Generator) -> Message:
    """Decode the bytes of `message` after one bit flip."""
    data = bytearray(cdr.encode(message))
    bit = int(generator.integers(8 * len(data)))
    data[bit // 8] ^= 1 << bit % 8
    return cdr.decode(type(message), bytes(data))
