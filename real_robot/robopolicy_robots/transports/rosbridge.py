"""Transport over rosbridge (protocol v2, JSON on a websocket), to ROS 1 or ROS 2.

Two threads own the socket: one receives and keeps the newest messages of each topic until they are read; one sends,
so that publishing never waits. A lost connection is opened again, and its topics with it; what arrives then comes from
another `publisher`. The peers of a topic are read from the services `/rosapi/publishers` and `/rosapi/subscribers` once
a second; where that node does not run, a publisher is counted while messages arrive.

rosbridge has no authentication of its own: reach one beyond this machine through a proxy with TLS (`wss://`) and a
token.
"""

from __future__ import annotations

import json as text
import math
import threading
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from robopolicy.deploy.wire import is_loopback
from robopolicy.optional import require
from robopolicy_robots.codecs import json
from robopolicy_robots.codecs.definitions import prepare
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport, TransportError, drain
from robopolicy_robots.transports.names import ros1_type

CLOSING = 1.0  # [s] timeout of closing
PUBLISHER_TIMEOUT = 1.0  # seconds after its last message for which a publisher is counted
PEER_POLL_PERIOD = 1.0  # [s] between requests to rosapi
MAX_MESSAGE_BYTES = 64 * 2**20  # bytes of a message
RETRY = 0.5  # seconds between attempts to connect again


class RosbridgePublisher(Publisher[M]):
    """Sends the newest message of a topic."""

    def __init__(self, link: _Link, topic: str, kind: type[M]) -> None:
        super().__init__(topic, kind)
        self.peers: tuple[str, ...] | None = None  # None: unknown
        self._link = link
        prepare(kind)

    def _send(self, message: M) -> None:
        fields = json.encode(message, self._link.ros1)
        self._link.send(self.topic, text.dumps({"op": "publish", "topic": self.topic, "msg": fields}, allow_nan=False))

    def _peers(self) -> tuple[str, ...]:
        if not self._link.connected():
            return ()
        return ("rosbridge",) if self.peers is None else self.peers

    def _leave(self) -> None:
        self._link.remove(self, "unadvertise")


class RosbridgeSubscription(Subscription[M]):
    """Keeps the newest messages of a topic."""

    def __init__(self, link: _Link, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        self.peers: tuple[str, ...] | None = None  # None: unknown
        self.kept: deque[Arrival] = deque(maxlen=qos.depth)
        self.last_arrival = -math.inf  # when the last message arrived, monotonic [s]
        self._link = link
        prepare(kind)

    def _arrived(self) -> list[Arrival]:
        return drain(self.kept)

    def _read(self, data: Any) -> M:
        return json.decode(self.kind, data)

    def _peers(self) -> tuple[str, ...]:
        if not self._link.connected():
            return ()
        if self.peers is not None:
            return self.peers
        return ("rosbridge",) if time.monotonic() - self.last_arrival < PUBLISHER_TIMEOUT else ()

    def _leave(self) -> None:
        self._link.remove(self, "unsubscribe")


class RosbridgeTransport(Transport):
    """ROS over rosbridge.

    Args:
        url: Of the server, `ws://` or `wss://`.
        ros1: The server runs ROS 1, whose types and times are spelled otherwise.
        token: For a proxy, sent as `Authorization: Bearer TOKEN`; only over `wss://` or on this machine.
        timeout: Seconds to wait for the first connection.
    """

    module = "websockets"
    extra = "ros"

    def __init__(
        self, url: str = "ws://127.0.0.1:9090", ros1: bool = False, token: str | None = None, timeout: float = 5.0
    ) -> None:
        super().__init__()
        self._link = _Link(url, ros1, token, timeout)

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> RosbridgePublisher[M]:
        publisher = RosbridgePublisher(self._link, topic, kind)  # of `qos`, rosbridge knows whether it is latched
        self._link.add(publisher, {"op": "advertise", "latch": qos.latched, "queue_size": 1})
        return publisher

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> RosbridgeSubscription[M]:
        # The server chooses what it asks of publishers.
        subscription = RosbridgeSubscription(self._link, topic, kind, qos)
        self._link.add(subscription, {"op": "subscribe", "queue_length": qos.depth, "throttle_rate": 0})
        return subscription

    def _leave(self) -> None:
        self._link.close()


class _Link:
    """The connection and its two threads."""

    def __init__(self, url: str, ros1: bool, token: str | None, timeout: float) -> None:
        client = require("websockets.sync.client", "ros")
        self.url, self.ros1 = url, ros1
        headers = {"Authorization": f"Bearer {token}"} if token else None
        address = urlsplit(url)
        if token and address.scheme != "wss" and not is_loopback(address.hostname or ""):
            raise TransportError(f"A token would cross the network in the clear; use wss:// instead of {url}.")
        options: dict[str, Any] = {
            "compression": None,
            "max_size": MAX_MESSAGE_BYTES,
            "close_timeout": CLOSING,
            "proxy": None,
        }
        self._dial = lambda: client.connect(url, additional_headers=headers, open_timeout=timeout, **options)
        self._requests: list[tuple[Any, str]] = []  # our endpoints and their requests
        self._outgoing: dict[str, str] = {}  # {topic: newest message, in JSON}
        self._controls: list[str] = []  # requests to send before those
        self._changed = threading.Condition()  # guards all of the above
        self._connection, self._closed = 1, False
        try:
            self._socket: Any = self._dial()
        except (OSError, ValueError, require("websockets.exceptions", "ros").WebSocketException) as error:
            reason = " ".join(str(error).split())
            raise TransportError(f"No rosbridge server at {url}: {reason}; start rosbridge_server.") from error
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def add(self, end: Any, request: dict[str, Any]) -> None:
        """Subscribe to or advertise a topic, now and after every reconnection."""
        name = ros1_type(end.kind) if self.ros1 else end.kind.ros_name
        with self._changed:
            self._requests.append((end, text.dumps({**request, "topic": end.topic, "type": name})))
            self._controls.append(self._requests[-1][1])
            self._changed.notify()

    def remove(self, end: Any, operation: str) -> None:
        """Cancel a topic."""
        with self._changed:
            self._requests = [each for each in self._requests if each[0] is not end]
            self._controls.append(text.dumps({"op": operation, "topic": end.topic}))
            self._changed.notify()

    def send(self, topic: str, message: str) -> None:
        """Send a message when the socket is ready, unless a newer one replaces it."""
        with self._changed:
            self._outgoing[topic] = message
            self._changed.notify()

    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._socket is not None

    def close(self) -> None:
        """Leave."""
        with self._changed:
            self._closed = True
            socket, self._socket = self._socket, None
            self._changed.notify_all()
        if socket is not None:
            socket.close()
        for thread in self._threads:
            thread.join(2 * CLOSING)

    def _read(self) -> None:
        while not self._closed:
            socket = self._socket
            try:
                if socket is None:
                    self._connect_again()
                else:
                    for data in socket:
                        self._take(data)
                    self._lose(socket)  # closed by the server
            except Exception:  # of the network or of what it sent: nothing may end this thread
                self._lose(socket)

    def _connect_again(self) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, RETRY):
                return
        socket = self._dial()
        with self._changed:
            self._connection += 1
            self._controls = [request for _, request in self._requests]
            self._outgoing.clear()  # commands of before are not for now
            self._socket = None if self._closed else socket
            self._changed.notify_all()
        if self._closed:
            socket.close()

    def _lose(self, socket: Any) -> None:
        with self._changed:
            if self._socket is socket:
                self._socket = None
            for end, _ in self._requests:
                end.peers = None
        if socket is not None:
            socket.close()

    def _take(self, data: str | bytes) -> None:
        now = time.monotonic()
        try:
            message = text.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            return
        if message.get("op") == "publish":
            for end, _ in self._requests:
                if isinstance(end, RosbridgeSubscription) and end.topic == message.get("topic"):
                    end.last_arrival = now
                    end.kept.append(Arrival(message.get("msg"), now, f"{self.url}#{self._connection}"))
        elif message.get("op") == "service_response" and isinstance(message.get("values"), dict):
            word, _, topic = str(message.get("id")).partition(":")
            names = message["values"].get(word)
            for end, _ in self._requests:
                if isinstance(names, list) and end.topic == topic and _question(end) == word:
                    end.peers = tuple(sorted(map(str, names)))

    def _write(self) -> None:
        asked = 0.0
        while not self._closed:
            with self._changed:
                if not (self._controls or self._outgoing):
                    self._changed.wait(PEER_POLL_PERIOD)
                socket = self._socket
                if socket is None:
                    self._changed.wait_for(lambda: self._closed or self._socket is not None, RETRY)
                    continue
                if time.monotonic() - asked > PEER_POLL_PERIOD:
                    asked = time.monotonic()
                    self._controls += self._questions()
                parcels = [*self._controls, *self._outgoing.values()]
                self._controls, self._outgoing = [], {}
            try:
                for parcel in parcels:
                    socket.send(parcel)
            except Exception:  # whatever the network does: the reader connects again
                self._lose(socket)

    def _questions(self) -> list[str]:
        asked = {(_question(end), end.topic) for end, _ in self._requests}
        return [
            text.dumps(
                {"op": "call_service", "id": f"{word}:{topic}", "service": f"/rosapi/{word}", "args": {"topic": topic}}
            )
            for word, topic in sorted(asked)
        ]


def _question(end: Any) -> str:
    return "publishers" if isinstance(end, RosbridgeSubscription) else "subscribers"
