"""Transport to ROS 1 through `rospy`, from Debian packages or ROS Noetic.

rospy only transfers bytes, which our codec encodes and decodes, so message packages are not needed. Its threads store
the newest messages of each topic. A node lives as long as its process. The ROS 1 master lists dead nodes until a
cleanup, so ages must be checked.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from functools import cache
from importlib import import_module
from typing import Any

from robopolicy_robots.codecs import ros1
from robopolicy_robots.codecs.definitions import prepare
from robopolicy_robots.message import Message
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport, TransportError, drain
from robopolicy_robots.transports.names import ros1_type

DEBIAN = "/usr/lib/python3/dist-packages"  # rospy of Debian, which is not in virtual environments


class Ros1Publisher(Publisher[M]):
    """Publisher with rospy, with a queue of one message and its own thread."""

    def __init__(self, rospy: Any, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind)
        options = {"queue_size": 1, "tcp_nodelay": True, "latch": qos.latched}
        self._class = wire_class(kind)
        self._inner: Any = rospy.Publisher(topic, self._class, **options)

    def _send(self, message: M) -> None:
        self._inner.publish(self._class(ros1.encode(message)))

    def _peers(self) -> tuple[str, ...]:
        return _numbered(self._inner.get_num_connections())

    def _leave(self) -> None:
        self._inner.unregister()


class Ros1Subscription(Subscription[M]):
    """Subscription with rospy."""

    def __init__(self, rospy: Any, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        self._kept: deque[Arrival] = deque(maxlen=qos.depth)
        self._connections: dict[str, tuple[Any, int]] = {}  # {node: connection header, number of the connection}
        options = {"queue_size": qos.depth, "tcp_nodelay": True, "buff_size": 2**24}
        self._inner: Any = rospy.Subscriber(topic, wire_class(kind), self._keep, **options)

    def _arrived(self) -> list[Arrival]:
        return drain(self._kept)

    def _read(self, data: bytes) -> M:
        return ros1.decode(self.kind, data)

    def _peers(self) -> tuple[str, ...]:
        return _numbered(self._inner.get_num_connections())

    def _leave(self) -> None:
        self._inner.unregister()

    def _keep(self, message: Any) -> None:
        header = message._connection_header
        node = str(header.get("callerid"))
        known, number = self._connections.get(node, (None, 0))
        if known is not header:  # a new connection: the node or the network restarted
            number += 1
            self._connections[node] = header, number
        self._kept.append(Arrival(message.data, time.monotonic(), f"{node}#{number}"))


class Ros1Transport(Transport):
    """ROS 1 through rospy.

    ROS_MASTER_URI is the address of the master, and ROS_IP our address (loopback by default).

    Args:
        node: Name of the ROS node, made unique; the first transport of a process sets it.
    """

    module = "rospy"
    install = "apt-get install python3-rospy, or set up a ROS 1 shell"

    def __init__(self, node: str = "robopolicy") -> None:
        super().__init__()
        self._rospy: Any = _rospy()
        if not any(os.environ.get(name) for name in ("ROS_IP", "ROS_HOSTNAME")):
            os.environ["ROS_IP"] = "127.0.0.1"  # without it, rospy listens on every interface
        if not import_module("rosgraph").is_master_online():
            master = os.environ.get("ROS_MASTER_URI", "http://localhost:11311")
            raise TransportError(f"No ROS master answers at {master}; start roscore or set ROS_MASTER_URI.")
        if not self._rospy.core.is_initialized():
            self._rospy.init_node(node, anonymous=True, disable_signals=True)

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> Ros1Publisher[M]:
        return Ros1Publisher(self._rospy, topic, kind, qos)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> Ros1Subscription[M]:
        return Ros1Subscription(self._rospy, topic, kind, qos)  # ROS 1 is always reliable


@cache
def wire_class(kind: type[Message]) -> Any:
    """Create a message class for rospy that contains the bytes of `kind`."""
    prepare(kind)
    text, checksum = ros1.definition(kind)

    class Wire(import_module("genpy").Message):
        __slots__ = ("data",)
        _slot_types = ("uint8[]",)
        _type, _md5sum, _full_text, _has_header = ros1_type(kind), checksum, text, False

        def __init__(self, data: bytes = b"") -> None:
            self.data = data

        def serialize(self, buffer: Any) -> None:
            buffer.write(self.data)

        def deserialize(self, data: bytes) -> Wire:
            self.data = bytes(data)
            return self

    return Wire


def _rospy() -> Any:
    try:
        return import_module("rospy")
    except ImportError:
        if DEBIAN not in sys.path and os.path.isdir(f"{DEBIAN}/rospy"):
            sys.path.append(DEBIAN)  # last, so that our packages take precedence
            return import_module("rospy")
        text = "ROS 1 needs rospy; run: apt-get install python3-rospy, or set up a ROS 1 shell."
        raise TransportError(text) from None


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"connection {number}" for number in range(1, count + 1))
