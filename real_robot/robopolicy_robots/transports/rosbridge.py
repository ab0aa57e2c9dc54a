"""Transport over rosbridge (protocol v2, JSON on a websocket), to ROS 1 or ROS 2.

Two threads use the socket: one receives and stores the newest messages of each topic, one sends, so that publishing
never waits. A lost connection and its topics are opened again; messages then have another `publisher`. The peers of a
topic are requested once per second from the services `/rosapi/publishers` and `/rosapi/subscribers`; without that node,
a publisher is counted while messages arrive.

rosbridge has no authentication: use a proxy with TLS (`wss://`) and a token for a server on another machine.
"""

from __future__ import annotations

import json as text
import math
import threading
import time
from collections import deque
from typing import Any

from robopolicy.deploy.websocket import parse_address
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.tokens import client_token
from robopolicy_robots.codecs import json
from robopolicy_robots.codecs.definitions import prepare
from robopolicy_robots.messages import JointTrajectory
from robopolicy_robots.transports.actions import FOLLOW_JOINT_TRAJECTORY, GoalTracker, goal_failure
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport, TransportError, drain
from robopolicy_robots.transports.names import ros1_type

CLOSE_TIMEOUT = 1.0  # [s] timeout of closing
PUBLISHER_TIMEOUT = 1.0  # [s] time after its last message for which a publisher is counted
PEER_POLL_PERIOD = 1.0  # [s] between requests to rosapi
MAX_MESSAGE_BYTES = 64 * 2**20
RETRY = 0.5  # [s] between attempts to reconnect
ACTION_SERVERS = "action_servers"  # service of rosapi


class RosbridgePublisher(Publisher[M]):
    """Publisher over rosbridge, which sends the newest message."""

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
    """Subscription over rosbridge."""

    def __init__(self, link: _Link, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        self.peers: tuple[str, ...] | None = None  # None: unknown
        self.queue: deque[Arrival] = deque(maxlen=qos.depth)
        self.last_arrival = -math.inf  # [s, monotonic] time of the last message
        self._link = link
        prepare(kind)

    def _arrived(self) -> list[Arrival]:
        return drain(self.queue)

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


class RosbridgeTrajectoryClient(GoalTracker):
    """Client of an action over rosbridge (server of version 2 and later, with ROS 2)."""

    merge_time = 0.1  # the server creates a client in ROS for each goal

    def __init__(self, link: _Link, action: str) -> None:
        super().__init__(action)
        self.servers: tuple[str, ...] | None = None  # names of the action servers; None: unknown
        self._link = link
        link.add_client(self)

    @property
    def matched(self) -> int:
        """Number of action servers; 1 while connected if rosapi does not list them."""
        return int(self._link.connected() and (self.servers is None or self.action in self.servers))

    def close(self) -> None:
        """Do nothing: the server keeps no state of a client between goals."""

    def receive(self, message: dict[str, Any]) -> None:
        """Read a message of the server about a goal."""
        goal, values = str(message.get("id")), message.get("values")
        if message.get("op") == "action_feedback":
            self._answer(goal)
        elif message.get("result") is False:  # the goal was rejected, or the server failed
            self._end(goal, " ".join(str(values).split())[:200])
        else:
            fields = values if isinstance(values, dict) else {}
            code, text = fields.get("error_code"), fields.get("error_string", "")
            self._end(goal, goal_failure(message.get("status"), code, text))

    def lose(self) -> None:
        """End the goals without a result, and cancel them once the connection is open again."""
        self.servers = None
        with self._lock:
            goals = list(self._running)
        for goal in goals:
            self._cancel(goal)
            self._end(goal, "the connection to rosbridge was lost")

    def _send(self, goal: str, trajectory: JointTrajectory) -> None:
        if not self._link.connected():
            self._end(goal, "no connection to rosbridge")
            return
        arguments = {"trajectory": json.encode(trajectory)}
        request = self._request("send_action_goal", goal) | {"args": arguments, "feedback": True}
        self._link.send(self.action, text.dumps(request, allow_nan=False))

    def _cancel(self, goal: str) -> None:
        self._link.cancel(self.action, text.dumps(self._request("cancel_action_goal", goal)))

    def _request(self, operation: str, goal: str) -> dict[str, Any]:
        return {"op": operation, "id": goal, "action": self.action, "action_type": FOLLOW_JOINT_TRAJECTORY}


class RosbridgeTransport(Transport):
    """ROS over rosbridge.

    Args:
        url: Address of the server, `ws://` or `wss://`; a token for a proxy is bound to its host (`robopolicy.tokens`).
        ros1: Whether the server runs ROS 1, with its names of types and fields.
        timeout: Timeout of a connection attempt [s].
    """

    module = "websockets"
    extra = "ros"

    def __init__(self, url: str = "ws://127.0.0.1:9090", ros1: bool = False, timeout: float = 5.0) -> None:
        super().__init__()
        self._link = _Link(url, ros1, timeout)

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> RosbridgePublisher[M]:
        publisher = RosbridgePublisher(self._link, topic, kind)  # rosbridge supports only `latched` of the QoS
        self._link.add(publisher, {"op": "advertise", "latch": qos.latched, "queue_size": 1})
        return publisher

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> RosbridgeSubscription[M]:
        # The server chooses the QoS of its subscription.
        subscription = RosbridgeSubscription(self._link, topic, kind, qos)
        self._link.add(subscription, {"op": "subscribe", "queue_length": qos.depth, "throttle_rate": 0})
        return subscription

    def _trajectory_client(self, action: str) -> RosbridgeTrajectoryClient:
        if self._link.ros1:
            raise TransportError("Actions of ROS 1 are not supported; use the controller's topic 'command'.")
        return RosbridgeTrajectoryClient(self._link, action)

    def _leave(self) -> None:
        self._link.close()


class _Link:
    """Connection and its two threads."""

    def __init__(self, url: str, ros1: bool, timeout: float) -> None:
        client = require("websockets.sync.client", "ros")
        self.url, self.ros1 = url, ros1
        try:
            token = client_token(parse_address(str(url)))
        except UserError as error:
            raise TransportError(str(error)) from error
        headers = {"Authorization": f"Bearer {token}"} if token else None
        options: dict[str, Any] = {"compression": None, "proxy": None}
        options |= {"max_size": MAX_MESSAGE_BYTES, "close_timeout": CLOSE_TIMEOUT}
        self._open_socket = lambda: client.connect(url, additional_headers=headers, open_timeout=timeout, **options)
        self._requests: list[tuple[Any, str]] = []  # our endpoints and their requests
        self._clients: list[RosbridgeTrajectoryClient] = []
        self._outgoing: dict[str, str] = {}  # {topic or action: newest message or goal, in JSON}
        self._cancels: list[str] = []  # requests to cancel goals, kept until they are sent
        self._controls: list[str] = []  # requests to send before messages
        self._changed = threading.Condition()  # guards all of the above
        self._connection, self._closed = 1, False
        try:
            self._socket: Any = self._open_socket()
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

    def add_client(self, client: RosbridgeTrajectoryClient) -> None:
        """Deliver messages about goals of the client."""
        with self._changed:
            self._clients.append(client)

    def cancel(self, action: str, request: str) -> None:
        """Send a request to cancel a goal, now or after the reconnection; drop a goal that was not sent yet."""
        with self._changed:
            self._outgoing.pop(action, None)
            self._cancels.append(request)
            self._changed.notify()

    def send(self, topic: str, message: str) -> None:
        """Send a message when the socket is ready, unless a newer one replaces it."""
        with self._changed:
            self._outgoing[topic] = message
            self._changed.notify()

    def connected(self) -> bool:
        """Whether the connection is open."""
        return self._socket is not None

    def close(self) -> None:
        """Close the connection and end its threads, after requests to cancel goals are sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._cancels or self._socket is None, CLOSE_TIMEOUT)
            self._closed = True
            socket, self._socket = self._socket, None
            self._changed.notify_all()
        if socket is not None:
            socket.close()
        for thread in self._threads:
            thread.join(2 * CLOSE_TIMEOUT)

    def _read(self) -> None:
        while not self._closed:
            socket = self._socket
            try:
                if socket is None:
                    self._reconnect()
                else:
                    for data in socket:
                        self._receive(data)
                    self._drop(socket)  # closed by the server
            except Exception:  # of the network or the received data, which must not end this thread
                self._drop(socket)

    def _reconnect(self) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, RETRY):
                return
        socket = self._open_socket()
        with self._changed:
            self._connection += 1
            self._controls = [request for _, request in self._requests]
            self._outgoing.clear()  # discard old commands
            self._socket = None if self._closed else socket
            self._changed.notify_all()
        if self._closed:
            socket.close()

    def _drop(self, socket: Any) -> None:
        with self._changed:
            if self._socket is socket:
                self._socket = None
            for end, _ in self._requests:
                end.peers = None
        for client in self._clients:
            client.lose()
        if socket is not None:
            socket.close()

    def _receive(self, data: str | bytes) -> None:
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
                    end.queue.append(Arrival(message.get("msg"), now, f"{self.url}#{self._connection}"))
        elif message.get("op") in ("action_feedback", "action_result"):
            for client in self._clients:
                client.receive(message)
        elif message.get("op") == "service_response" and isinstance(message.get("values"), dict):
            service, _, topic = str(message.get("id")).partition(":")
            names = message["values"].get(service)
            for client in self._clients if service == ACTION_SERVERS and isinstance(names, list) else ():
                client.servers = tuple(map(str, names))
            for end, _ in self._requests:
                if isinstance(names, list) and end.topic == topic and _service(end) == service:
                    end.peers = tuple(sorted(map(str, names)))

    def _write(self) -> None:
        requested = 0.0
        while not self._closed:
            with self._changed:
                if not (self._cancels or self._controls or self._outgoing):
                    self._changed.wait(PEER_POLL_PERIOD)
                socket = self._socket
                if socket is None:
                    self._changed.wait_for(lambda: self._closed or self._socket is not None, RETRY)
                    continue
                if time.monotonic() - requested > PEER_POLL_PERIOD:
                    requested = time.monotonic()
                    self._controls += self._peer_requests()
                cancels = len(self._cancels)
                packets = [*self._cancels, *self._controls, *self._outgoing.values()]
                self._controls, self._outgoing = [], {}
            try:
                for packet in packets:
                    socket.send(packet)
            except Exception:  # of the network; the reading thread reconnects
                self._drop(socket)
            else:
                with self._changed:
                    del self._cancels[:cancels]
                    self._changed.notify_all()

    def _peer_requests(self) -> list[str]:
        calls = sorted({(_service(end), end.topic) for end, _ in self._requests})
        rows = [(f"{name}:{topic}", f"/rosapi/{name}", {"topic": topic}) for name, topic in calls]
        rows += [(f"{ACTION_SERVERS}:", f"/rosapi/{ACTION_SERVERS}", {})] if self._clients else []
        return [text.dumps({"op": "call_service", "id": i, "service": name, "args": args}) for i, name, args in rows]


def _service(end: Any) -> str:
    return "publishers" if isinstance(end, RosbridgeSubscription) else "subscribers"
