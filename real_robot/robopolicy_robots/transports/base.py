"""Interface of transports: publish, poll the newest message, list peers.

There are no callbacks: the control loop polls, and neither `publish` nor `latest` waits for a peer. Malformed messages
are counted and ignored, so that they affect only the message age that the watchdog checks.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any, ClassVar, Generic, Self, TypeVar

from robopolicy.errors import UserError, unknown_name
from robopolicy_robots.codecs.definitions import CodecError
from robopolicy_robots.message import Message
from robopolicy_robots.transports import TRANSPORTS
from robopolicy_robots.transports.actions import ACTION_TRANSPORTS, TrajectoryClient

M = TypeVar("M", bound=Message)
Item = TypeVar("Item")
TOPIC = re.compile(r"(/[A-Za-z_][A-Za-z0-9_]*)+")  # names valid in ROS 1 and ROS 2
BLOCKING = 0.010  # [s] maximum wait of publishing
MAX_DOMAIN = 232  # largest ROS_DOMAIN_ID; DDS has no ports for larger numbers
AUTO = "auto"  # name of the transport that fits the ROS environment


class TransportError(UserError):
    """Error of opening or using a transport."""


@dataclass(frozen=True)
class QoS:
    """Quality of service, in the terms of ROS 2. Publishers keep only the newest message.

    A publisher and a subscription match if the offer includes the request. Deadline, lifespan and liveliness are never
    requested, since publishers with the defaults of ROS do not offer them and would not match.
    """

    offers_reliable: bool  # our publishers resend lost messages
    requests_reliable: bool  # our subscriptions match only reliable publishers
    latched: bool = False  # late subscribers receive the newest message ("transient local")
    depth: int = 1  # messages kept until read


SENSOR = QoS(offers_reliable=True, requests_reliable=False)  # matches every publisher
IMAGE = QoS(offers_reliable=False, requests_reliable=False)
COMMAND = QoS(offers_reliable=True, requests_reliable=True)
LATCHED = QoS(
    offers_reliable=True, requests_reliable=True, latched=True, depth=16
)  # emergency stop, status, description


def unmet(requested: QoS, offered: QoS) -> tuple[str, ...]:
    """QoS policies of a subscription that a publisher does not meet; empty if they match."""
    reliability = ("reliability",) if requested.requests_reliable and not offered.offers_reliable else ()
    return (("durability",) if requested.latched and not offered.latched else ()) + reliability


@dataclass(frozen=True)
class Received(Generic[M]):
    """A received message with its metadata."""

    message: M
    received: float  # [s, monotonic] time of arrival, or of polling
    stamp: float | None  # time in its header [s since the epoch]; None without a header or with a stamp of zero
    publisher: str  # identity of the sender, which changes when the publisher restarts
    sequence: int  # number of the message within this subscription


@dataclass(frozen=True)
class Endpoint:
    """Description of a publisher or subscription of this process and its peers."""

    topic: str
    type: str  # ROS name of the message type
    publishes: bool
    matched: tuple[str, ...]  # identities of the peers if available, else numbers
    unmet: tuple[str, ...] = ()  # incompatible policies of other peers: "reliability", "durability", "type", ...
    malformed: int = 0  # messages that could not be decoded


@dataclass(frozen=True)
class Graph:
    """Endpoints of this process, in order of creation."""

    endpoints: tuple[Endpoint, ...]


class _End(ABC, Generic[M]):
    """Base class of publishers and subscriptions."""

    publishes: bool

    def __init__(self, topic: str, kind: type[M]) -> None:
        self.topic, self.kind = topic, kind
        self.malformed = 0  # messages that could not be decoded
        self._closed = False

    def describe(self) -> Endpoint:
        """Peers of the endpoint, and incompatible policies of other endpoints."""
        peers = self._matched_peers()
        return Endpoint(self.topic, self.kind.ros_name, self.publishes, peers, self._unmet(), self.malformed)

    def close(self) -> None:
        """Close; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._leave()

    def _matched_peers(self) -> tuple[str, ...]:
        if self._closed:
            raise TransportError("The transport is closed.")
        return self._peers()

    @abstractmethod
    def _peers(self) -> tuple[str, ...]:
        """Identities of the matched peers."""

    def _unmet(self) -> tuple[str, ...]:
        return ()

    def _leave(self) -> None:
        """Free resources; nothing by default."""


class Publisher(_End[M]):
    """Publisher of one topic."""

    publishes = True

    def publish(self, message: M) -> None:
        """Send a message; drops it after `BLOCKING` seconds.

        Raises:
            TransportError: The transport is closed, or the message has another type than the topic.
            CodecError: The message has invalid values.
        """
        if self._closed:
            raise TransportError("The transport is closed.")
        if type(message) is not self.kind:
            raise TransportError(f"{self.topic} has type {self.kind.ros_name}, not {type(message).__name__}.")
        self._send(message)

    @property
    def matched(self) -> int:
        """Number of matched subscriptions; 1 while connected on transports that cannot count them."""
        return len(self._matched_peers())

    @abstractmethod
    def _send(self, message: M) -> None:
        """Send a message of the right type."""


class Subscription(_End[M]):
    """Subscription of one topic, with its newest message and the last `depth` unread messages."""

    publishes = False

    def __init__(self, topic: str, kind: type[M], depth: int = 1) -> None:
        super().__init__(topic, kind)
        self.depth = depth
        self._received: Received[M] | None = None
        self._unread: deque[Received[M]] = deque(maxlen=depth)

    def latest(self) -> Received[M] | None:
        """Return the newest message since the start, without waiting."""
        if self._closed:
            raise TransportError("The transport is closed.")
        for arrival in self._arrived()[-self.depth :]:
            try:
                message = self._read(arrival.data)
            except CodecError:
                self.malformed += 1
            else:
                sequence = self._received.sequence + 1 if self._received else 1
                stamp = stamp_of(message)
                self._received = Received(message, arrival.received, stamp, arrival.publisher, sequence)
                self._unread.append(self._received)
        return self._received

    def unread(self) -> tuple[Received[M], ...]:
        """Return messages since the last call, oldest first, at most `depth`, without waiting."""
        self.latest()
        found = tuple(self._unread)
        self._unread.clear()
        return found

    @property
    def publishers(self) -> int:
        """Number of matched publishers, or of publishers in the last second on transports that cannot count them."""
        return len(self._matched_peers())

    @abstractmethod
    def _arrived(self) -> list[Arrival]:
        """Messages that arrived since the last call, oldest first; at most the last `depth` are used."""

    @abstractmethod
    def _read(self, data: Any) -> M:
        """Decode received data; raises `CodecError` for invalid data."""


@dataclass(frozen=True)
class Arrival:
    """Received data of a transport."""

    data: Any  # encoded by the transport
    received: float  # monotonic [s]
    publisher: str


def drain(queue: deque[Item]) -> list[Item]:
    """Remove and return all items of a queue, oldest first, while another thread may append."""
    return [queue.popleft() for _ in range(len(queue))]


class Transport(ABC):
    """Connection to a robot; a context manager that closes it.

    The arguments of its constructor are its settings; `connect` sets `domain` and `robot` from the robot description.
    """

    module: ClassVar[str] = ""  # required package
    extra: ClassVar[str] = ""  # extra of robopolicy that installs the package
    install: ClassVar[str] = ""  # instruction to install the package without an extra

    def __init__(self) -> None:
        self._ends: list[Publisher[Any] | Subscription[Any]] = []
        self._clients: list[TrajectoryClient] = []
        self._closed = False

    def advertise(self, topic: str, kind: type[M], qos: QoS) -> Publisher[M]:
        """Create a publisher of `topic` ("/joint_states"); raises `TransportError` if closed or invalid."""
        publisher = self._publisher(self._checked(topic), kind, qos)
        self._ends.append(publisher)
        return publisher

    def subscribe(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        """Create a subscription of `topic`; raises `TransportError` if closed or invalid."""
        subscription = self._subscription(self._checked(topic), kind, qos)
        self._ends.append(subscription)
        return subscription

    def trajectory_client(self, action: str) -> TrajectoryClient:
        """Create a client of the trajectory controller with `action` ("/arm_controller/follow_joint_trajectory").

        Raises:
            TransportError: The transport is closed or has no actions, or the name is invalid.
        """
        client = self._trajectory_client(self._checked(action))
        self._clients.append(client)
        return client

    def graph(self) -> Graph:
        """Connections of all endpoints."""
        if self._closed:
            raise TransportError("The transport is closed.")
        return Graph(tuple(end.describe() for end in self._ends))

    def close(self) -> None:
        """Close the transport and all its endpoints; safe to call twice."""
        if not self._closed:
            self._closed = True
            for end in (*self._clients, *self._ends):
                end.close()
            self._clients.clear()
            self._ends.clear()
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checked(self, topic: str) -> str:
        if self._closed:
            raise TransportError("The transport is closed.")
        if not TOPIC.fullmatch(topic):
            raise TransportError(f"Expected an absolute topic like '/arm/joint_states', found '{topic}'.")
        return topic

    def _trajectory_client(self, action: str) -> TrajectoryClient:
        """Make a client of an action; an error by default."""
        names = " or ".join(ACTION_TRANSPORTS)
        raise TransportError(f"This transport has no actions, such as {action}: choose the transport {names}.")

    @abstractmethod
    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> Publisher[M]:
        """Make a publisher."""

    @abstractmethod
    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        """Make a subscription."""

    def _leave(self) -> None:
        """Free resources after the endpoints; nothing by default."""


def stamp_of(message: Message) -> float | None:
    """Time in the header [s since the epoch]; None without a header or with a stamp of zero ("not given")."""
    header = getattr(message, "header", None)
    return header.stamp.seconds or None if header is not None else None


def ros_domain(domain: int | None) -> int:
    """ROS 2 domain: `domain`, else ROS_DOMAIN_ID, else 0; raises `TransportError` for invalid numbers."""
    text = os.environ.get("ROS_DOMAIN_ID", "").strip() or "0" if domain is None else str(domain)
    if not text.isdecimal() or int(text) > MAX_DOMAIN:
        raise TransportError(f"A ROS_DOMAIN_ID is a number from 0 to {MAX_DOMAIN}, got '{text}'.")
    return int(text)


def open_transport(name: str, **settings: Any) -> Transport:
    """Open a transport by its name.

    Args:
        name: Key in `TRANSPORTS`, or "auto" for `rclpy` in a ROS 2 environment. There is no fallback, since a robot
            must not be controlled over an unexpected network.
        **settings: Arguments of its class.

    Raises:
        TransportError: The transport cannot be opened.
        UserError: The name or a setting is unknown, or a package is missing.
    """
    if name == AUTO:
        name = _ros_environment()
    known = transport_settings(name)
    for setting in settings:
        if setting not in known and "settings" not in known:  # which accepts any setting
            raise unknown_name("setting", setting, known, f"of transport {name}")
    return TRANSPORTS[name](**settings)


def transport_names() -> tuple[str, ...]:
    """Names of transports, for `open_transport`."""
    return (*TRANSPORTS, AUTO)


def check_transport(name: str) -> None:
    """Raise `UserError` for an unknown transport."""
    if name not in transport_names():
        raise unknown_name("transport", name, transport_names())


def transport_settings(name: str) -> tuple[str, ...]:
    """Names of the settings of a transport; none for "auto", which depends on the environment."""
    check_transport(name)
    return () if name == AUTO else tuple(signature(TRANSPORTS[name]).parameters)


def has_actions(name: str) -> bool:
    """Whether a transport can have clients of actions; true for "auto", which depends on the environment."""
    return name == AUTO or TRANSPORTS[name]._trajectory_client is not Transport._trajectory_client


def _ros_environment() -> str:
    if os.environ.get("ROS_DISTRO") and find_spec("rclpy") is not None:
        return "rclpy"
    choices = ", ".join(TRANSPORTS)
    raise TransportError(f"ROS 2 is not set up here (ROS_DISTRO and rclpy); choose a transport: {choices}.")
