"""Transport within one process: for tests, and for a simulated robot that runs beside its controller.

Transports of the same `domain` see each other, as with ROS_DOMAIN_ID.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

from real_robot.message import Message
from real_robot.transports.base import (
    Endpoint,
    Graph,
    M,
    Publisher,
    QoS,
    Received,
    Subscription,
    Transport,
    TransportError,
    stamp_of,
    unmet,
)


class _Bus:
    """The endpoints of a domain; every access holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.publishers: list[LoopbackPublisher[Any]] = []
        self.subscriptions: list[LoopbackSubscription[Any]] = []


_buses: weakref.WeakValueDictionary[int, _Bus] = weakref.WeakValueDictionary()  # {domain: its bus}
_numbers = itertools.count(1)


class LoopbackPublisher(Publisher[M]):
    """Hands messages to the subscriptions of its bus."""

    def __init__(self, bus: _Bus, topic: str, kind: type[M], qos: QoS) -> None:
        self.topic, self.kind, self.qos = topic, kind, qos
        self.identity = f"loopback-{next(_numbers)}"
        self.last: M | None = None  # for subscriptions that come later
        self._bus: _Bus | None = bus

    def publish(self, message: M) -> None:
        """Hand a copy to every matched subscription."""
        if type(message) is not self.kind:
            raise TransportError(f"{self.topic} carries {self.kind.ros_name}, not {type(message).__name__}.")
        bus = _open(self._bus)
        message = message.copy()
        with bus.lock:
            self.last = message
            for subscription in bus.subscriptions:
                if _joined(self, subscription):
                    subscription.take(message, self.identity)

    @property
    def matched(self) -> int:
        """Subscriptions at the other end."""
        bus = _open(self._bus)
        with bus.lock:
            return sum(_joined(self, each) for each in bus.subscriptions)

    def close(self) -> None:
        """Leave the bus."""
        if self._bus is not None:
            with self._bus.lock:
                self._bus.publishers.remove(self)
        self._bus = None


class LoopbackSubscription(Subscription[M]):
    """Keeps the newest message."""

    def __init__(self, bus: _Bus, topic: str, kind: type[M], qos: QoS) -> None:
        self.topic, self.kind, self.qos = topic, kind, qos
        self.identity = f"loopback-{next(_numbers)}"
        self._bus: _Bus | None = bus
        self._received: Received[M] | None = None

    def take(self, message: M, publisher: str) -> None:
        """Keep a message; the bus is locked."""
        sequence = self._received.sequence + 1 if self._received else 1
        self._received = Received(message, time.monotonic(), stamp_of(message), publisher, sequence)

    def latest(self) -> Received[M] | None:
        """The newest message since the start."""
        return self._received

    @property
    def publishers(self) -> int:
        """Publishers at the other end."""
        bus = _open(self._bus)
        with bus.lock:
            return sum(_joined(each, self) for each in bus.publishers)

    @property
    def malformed(self) -> int:
        """None ever is: objects are handed over."""
        return 0

    def close(self) -> None:
        """Leave the bus."""
        if self._bus is not None:
            with self._bus.lock:
                self._bus.subscriptions.remove(self)
        self._bus = None


class LoopbackTransport(Transport):
    """Endpoints of this process; `domain` says which see each other."""

    def __init__(self, domain: int = 0) -> None:
        self._bus = _buses.setdefault(domain, _Bus())
        self._endpoints: list[LoopbackPublisher[Any] | LoopbackSubscription[Any]] = []
        self._closed = False

    def advertise(self, topic: str, kind: type[M], qos: QoS) -> LoopbackPublisher[M]:
        """Announce that we publish `topic`."""
        publisher = LoopbackPublisher(self._opened(), topic, kind, qos)
        with self._bus.lock:
            self._bus.publishers.append(publisher)
        self._endpoints.append(publisher)
        return publisher

    def subscribe(self, topic: str, kind: type[M], qos: QoS) -> LoopbackSubscription[M]:
        """Ask for what others publish on `topic`."""
        subscription = LoopbackSubscription(self._opened(), topic, kind, qos)
        with self._bus.lock:
            self._bus.subscriptions.append(subscription)
            if qos.latched:
                for publisher in self._bus.publishers:
                    if publisher.last is not None and _joined(publisher, subscription):
                        subscription.take(publisher.last, publisher.identity)
        self._endpoints.append(subscription)
        return subscription

    def graph(self) -> Graph:
        """Who is connected to what."""
        bus = self._opened()
        with bus.lock:
            return Graph(tuple(_describe(bus, each) for each in self._endpoints))

    def close(self) -> None:
        """Leave."""
        self._closed = True
        while self._endpoints:
            self._endpoints.pop().close()

    def _opened(self) -> _Bus:
        return _open(None if self._closed else self._bus)


TRANSPORT = LoopbackTransport


def _open(bus: _Bus | None) -> _Bus:
    if bus is None:
        raise TransportError("The transport is closed.")
    return bus


def _joined(publisher: LoopbackPublisher[Any], subscription: LoopbackSubscription[Any]) -> bool:
    return publisher.topic == subscription.topic and not _unmet(publisher, subscription)


def _unmet(publisher: LoopbackPublisher[Any], subscription: LoopbackSubscription[Any]) -> tuple[str, ...]:
    if publisher.kind is not subscription.kind:
        return ("type",)
    return unmet(subscription.qos, publisher.qos)


def _describe(bus: _Bus, endpoint: LoopbackPublisher[Any] | LoopbackSubscription[Any]) -> Endpoint:
    if isinstance(endpoint, LoopbackPublisher):
        pairs = [(each, _unmet(endpoint, each)) for each in bus.subscriptions if each.topic == endpoint.topic]
    else:
        pairs = [(each, _unmet(each, endpoint)) for each in bus.publishers if each.topic == endpoint.topic]
    matched = tuple(each.identity for each, policies in pairs if not policies)
    missing = {policy for _, policies in pairs for policy in policies}
    kind: type[Message] = endpoint.kind
    publishes = isinstance(endpoint, LoopbackPublisher)
    return Endpoint(endpoint.topic, kind.ros_name, publishes, matched, tuple(sorted(missing)))
