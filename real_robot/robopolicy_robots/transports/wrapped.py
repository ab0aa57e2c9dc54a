"""Base classes of transport wrappers, which forward all messages unchanged."""

from __future__ import annotations

from robopolicy_robots.transports.actions import TrajectoryClient
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport


class WrappedPublisher(Publisher[M]):
    """Publisher through `inner`."""

    def __init__(self, inner: Publisher[M]) -> None:
        super().__init__(inner.topic, inner.kind)
        self._inner = inner

    def _send(self, message: M) -> None:
        self._inner.publish(message)

    def _peers(self) -> tuple[str, ...]:
        return self._inner.describe().matched

    def _unmet(self) -> tuple[str, ...]:
        return self._inner.describe().unmet


class WrappedSubscription(Subscription[M]):
    """Subscription through `inner`."""

    def __init__(self, inner: Subscription[M]) -> None:
        super().__init__(inner.topic, inner.kind, inner.depth)
        self._inner = inner

    def _arrived(self) -> list[Arrival]:
        found = self._inner.unread()
        self.malformed = self._inner.malformed
        return [Arrival(each.message, each.received, each.publisher) for each in found]

    def _read(self, data: M) -> M:
        return data

    def _peers(self) -> tuple[str, ...]:
        return self._inner.describe().matched

    def _unmet(self) -> tuple[str, ...]:
        return self._inner.describe().unmet


class WrappedTransport(Transport):
    """Transport through `inner`; closing it also closes `inner`."""

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self._inner = inner

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> Publisher[M]:
        return WrappedPublisher(self._inner.advertise(topic, kind, qos))

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        return WrappedSubscription(self._inner.subscribe(topic, kind, qos))

    def trajectory_client(self, action: str) -> TrajectoryClient:
        """Create a client of `inner`, which closes it."""
        return self._inner.trajectory_client(action)

    def _leave(self) -> None:
        self._inner.close()
