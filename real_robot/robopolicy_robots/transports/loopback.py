"""Transport within one process, for tests and for a simulated robot in the same process."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport, drain, unmet


class _Bus:
    """Publishers and subscriptions of a domain; every access requires `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.publishers: list[LoopbackPublisher[Any]] = []
        self.subscriptions: list[LoopbackSubscription[Any]] = []


_buses: weakref.WeakValueDictionary[int, _Bus] = weakref.WeakValueDictionary()  # by domain
_numbers = itertools.count(1)


class LoopbackPublisher(Publisher[M]):
    """Publisher to the subscriptions of a bus."""

    def __init__(self, bus: _Bus, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind)
        self.qos = qos
        self.identity = f"loopback-{next(_numbers)}"
        self.last: M | None = None  # for later subscriptions
        self._bus = bus
        with bus.lock:
            bus.publishers.append(self)

    def _send(self, message: M) -> None:
        message = message.copy()
        with self._bus.lock:
            self.last = message
            for subscription in self._bus.subscriptions:
                if _matched(self, subscription):
                    subscription.store(message, self.identity)

    def _peers(self) -> tuple[str, ...]:
        with self._bus.lock:
            return tuple(each.identity for each in self._bus.subscriptions if _matched(self, each))

    def _unmet(self) -> tuple[str, ...]:
        with self._bus.lock:
            return _names(_unmet(self, each) for each in self._bus.subscriptions)

    def _leave(self) -> None:
        with self._bus.lock:
            self._bus.publishers.remove(self)


class LoopbackSubscription(Subscription[M]):
    """Subscription to the publishers of a bus."""

    def __init__(self, bus: _Bus, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        self.qos = qos
        self.identity = f"loopback-{next(_numbers)}"
        self._queue: deque[Arrival] = deque(maxlen=qos.depth)
        self._bus = bus
        with bus.lock:
            bus.subscriptions.append(self)
            for publisher in bus.publishers:
                if qos.latched and publisher.last is not None and _matched(publisher, self):
                    self.store(publisher.last, publisher.identity)

    def store(self, message: M, publisher: str) -> None:
        """Store a message; requires the lock of the bus."""
        self._queue.append(Arrival(message, time.monotonic(), publisher))

    def _arrived(self) -> list[Arrival]:
        with self._bus.lock:
            return drain(self._queue)

    def _read(self, data: M) -> M:
        return data

    def _peers(self) -> tuple[str, ...]:
        with self._bus.lock:
            return tuple(each.identity for each in self._bus.publishers if _matched(each, self))

    def _unmet(self) -> tuple[str, ...]:
        with self._bus.lock:
            return _names(_unmet(each, self) for each in self._bus.publishers)

    def _leave(self) -> None:
        with self._bus.lock:
            self._bus.subscriptions.remove(self)


class LoopbackTransport(Transport):
    """Transport within this process; transports of the same `domain` are connected."""

    def __init__(self, domain: int = 0) -> None:
        super().__init__()
        self._bus = _buses.setdefault(domain, _Bus())

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> LoopbackPublisher[M]:
        return LoopbackPublisher(self._bus, topic, kind, qos)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> LoopbackSubscription[M]:
        return LoopbackSubscription(self._bus, topic, kind, qos)


def _matched(publisher: LoopbackPublisher[Any], subscription: LoopbackSubscription[Any]) -> bool:
    return publisher.topic == subscription.topic and not _unmet(publisher, subscription)


def _unmet(publisher: LoopbackPublisher[Any], subscription: LoopbackSubscription[Any]) -> tuple[str, ...]:
    if publisher.topic != subscription.topic:
        return ()
    if publisher.kind is not subscription.kind:
        return ("type",)
    return unmet(subscription.qos, publisher.qos)


def _names(policies: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({policy for each in policies for policy in each}))
