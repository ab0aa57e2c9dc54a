"""Transport to ROS 2 over Zenoh without ROS: keys, attachments and liveliness tokens of `rmw_zenoh` (Jazzy and later).

It connects to a Zenoh router (`rmw_zenohd` or `zenohd`), or acts as one on this machine (`listen`).
Subscriptions keep the newest sample in a ring that is polled: a session with Python callbacks hangs at the exit of the
interpreter if it was not closed. `rmw_zenoh` matches any reliability and durability, and so does this: a subscription
that asks for more is matched and gets what there is.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from robopolicy.deploy.wire import is_loopback
from robopolicy.optional import require
from robopolicy_robots.codecs import CodecError, cdr
from robopolicy_robots.codecs.definitions import prepare, type_hash
from robopolicy_robots.message import Message
from robopolicy_robots.transports.base import (
    BLOCKING,
    Arrival,
    M,
    Publisher,
    QoS,
    Subscription,
    Transport,
    TransportError,
    ros_domain,
)
from robopolicy_robots.transports.names import dds_type

ROUTER = "tcp/127.0.0.1:7447"  # where rmw_zenohd listens
ATTACHMENT = struct.Struct("<QqB16s")  # sequence number, time of sending [ns], 16, identity of the publisher
QUEUE = 16  # batches that wait to be sent (the maximum of Zenoh), so that few messages are dropped
TOKENS = 256  # changes of the graph kept until read


class _ZenohEnd:
    """Common part of publishers and subscriptions: declaration, token and peers."""

    _declared: Any  # Zenoh's publisher or subscriber
    _token: Any
    _ends: _Ends

    def _announce(self, transport: ZenohTransport, topic: str, kind: type[Message], reliable: bool, qos: QoS) -> None:
        ours, theirs = ("MP", "MS") if isinstance(self, Publisher) else ("MS", "MP")
        self._token = transport.announce(ours, topic, kind, reliable, qos.latched)
        self._ends = _Ends(transport, theirs, topic, kind)

    def _peers(self) -> tuple[str, ...]:
        return self._ends.seen()

    def _unmet(self) -> tuple[str, ...]:
        return self._ends.unmet()

    def _leave(self) -> None:
        self._token.undeclare()
        self._declared.undeclare()
        self._ends.close()


class ZenohPublisher(_ZenohEnd, Publisher[M]):
    """Puts samples on the key of a topic."""

    def __init__(self, transport: ZenohTransport, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind)
        zenoh, session = require("zenoh", "ros"), transport.session
        prepare(kind)
        self._numbers, self._identity = itertools.count(1), os.urandom(16)
        options = {
            "express": True,  # no batching: each message leaves at once
            "congestion_control": zenoh.CongestionControl.DROP,  # rather than wait for a slow peer
            "reliability": zenoh.Reliability.RELIABLE if qos.offers_reliable else zenoh.Reliability.BEST_EFFORT,
        }
        key = transport.key(topic, kind)
        if qos.latched:
            extension = require("zenoh.ext", "ros")
            cache = extension.CacheConfig(1)
            declare = extension.declare_advanced_publisher
            self._declared = declare(session, key, cache=cache, publisher_detection=True, **options)
        else:
            self._declared = session.declare_publisher(key, **options)
        self._announce(transport, topic, kind, qos.offers_reliable, qos)

    def _send(self, message: M) -> None:
        attachment = ATTACHMENT.pack(next(self._numbers), time.time_ns(), 16, self._identity)
        self._declared.put(cdr.encode(message), attachment=attachment)


class ZenohSubscription(_ZenohEnd, Subscription[M]):
    """Keeps the newest samples of a topic's key."""

    def __init__(self, transport: ZenohTransport, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        prepare(kind)
        key, ring = transport.key(topic, kind), require("zenoh", "ros").handlers.RingChannel(qos.depth)
        if qos.latched:
            extension = require("zenoh.ext", "ros")
            history = extension.HistoryConfig(detect_late_publishers=True, max_samples=1)
            declare = extension.declare_advanced_subscriber
            self._declared = declare(transport.session, key, ring, history=history)
        else:
            self._declared = transport.session.declare_subscriber(key, ring)
        self._announce(transport, topic, kind, qos.requests_reliable, qos)

    def _arrived(self) -> list[Arrival]:
        found: list[Arrival] = []
        while len(found) < self.depth and (sample := self._declared.try_recv()) is not None:
            attachment = b"" if sample.attachment is None else sample.attachment.to_bytes()
            found.append(Arrival((sample.payload.to_bytes(), attachment), time.monotonic(), attachment[-16:].hex()))
        return found

    def _read(self, data: tuple[bytes, bytes]) -> M:
        if len(data[1]) != ATTACHMENT.size:
            raise CodecError(f"Expected {ATTACHMENT.size} bytes of rmw_zenoh's attachment, found {len(data[1])}")
        return cdr.decode(self.kind, data[0])


class ZenohTransport(Transport):
    """ROS 2 over Zenoh.

    Args:
        domain: ROS_DOMAIN_ID; from the environment by default, or 0.
        router: Endpoint of the router to connect to.
        listen: Act as the router at this endpoint of this machine ("tcp/127.0.0.1:7447") instead.
        node: Name of our node in ROS.
    """

    module = "zenoh"
    extra = "ros"

    def __init__(
        self, domain: int | None = None, router: str = ROUTER, listen: str | None = None, node: str = "robopolicy"
    ) -> None:
        super().__init__()
        zenoh = require("zenoh", "ros")
        require("rosbags.typesys", "ros")  # whose codecs every message needs
        self.domain = ros_domain(domain)
        self.node = node
        try:
            self.session: Any = zenoh.open(_config(zenoh, router, listen))
        except zenoh.ZError as error:
            raise TransportError(f"No Zenoh router at {listen or router}: {str(error).split('. ')[0]}.") from error
        self._numbers = itertools.count(1)
        start = f"@ros2_lv/{self.domain}/{self.session.zid()}/0"
        self._token: Any = self.session.liveliness().declare_token(f"{start}/0/NN/%/%/{node}")

    def key(self, topic: str, kind: type[Message]) -> str:
        """The key on which a topic's samples are put."""
        return f"{self.domain}/{topic[1:]}/{dds_type(kind)}/{type_hash(kind)}"

    def announce(self, role: str, topic: str, kind: type[Message], reliable: bool, latched: bool) -> Any:
        """Liveliness token of a publisher ("MP") or subscription ("MS")."""
        start = f"@ros2_lv/{self.domain}/{self.session.zid()}/0/{next(self._numbers)}/{role}/%/%/{self.node}"
        # Numbers of rmw's enumerations where they differ from ROS's defaults, then a history of 1.
        quality = f"{'' if reliable else 2}:{1 if latched else ''}:,1:,:,:,,"
        token = f"{start}/{topic.replace('/', '%')}/{dds_type(kind)}/{type_hash(kind)}/{quality}"
        return self.session.liveliness().declare_token(token)

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> ZenohPublisher[M]:
        return ZenohPublisher(self, topic, kind, qos)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> ZenohSubscription[M]:
        return ZenohSubscription(self, topic, kind, qos)

    def _leave(self) -> None:
        self.session.close()


class _Ends:
    """Peers of a topic, from their tokens; a ring of changes, since a full queue would stop the session."""

    def __init__(self, transport: ZenohTransport, role: str, topic: str, kind: type[Message]) -> None:
        zenoh = require("zenoh", "ros")
        key = f"@ros2_lv/{transport.domain}/*/*/*/{role}/*/*/*/{topic.replace('/', '%')}/*/*/*"
        ring = zenoh.handlers.RingChannel(TOKENS)
        self._changes: Any = transport.session.liveliness().declare_subscriber(key, ring, history=True)
        self._gone = zenoh.SampleKind.DELETE
        self._type = [dds_type(kind), type_hash(kind)]
        self._types: dict[str, list[str]] = {}

    def seen(self) -> tuple[str, ...]:
        """Peers of our type, as session, node and entity; a restart gives a new identity."""
        while (change := self._changes.try_recv()) is not None:
            words = str(change.key_expr).split("/")
            peer = "/".join(words[2:5])
            if change.kind == self._gone:
                self._types.pop(peer, None)
            else:
                self._types[peer] = words[-3:-1]
        return tuple(sorted(peer for peer, name in self._types.items() if name == self._type))

    def unmet(self) -> tuple[str, ...]:
        """Reasons why other peers do not match."""
        return ("type",) if len(self.seen()) < len(self._types) else ()

    def close(self) -> None:
        """Stop watching."""
        self._changes.undeclare()


def _config(zenoh: Any, router: str, listen: str | None) -> Any:
    if listen is not None and not is_loopback(urlsplit(f"//{listen.split('/', 1)[-1]}").hostname or ""):
        raise TransportError(f"This process is a router for this machine alone; run zenohd to listen at {listen}.")
    config = zenoh.Config()
    settings: dict[str, Any] = {
        "mode": "router" if listen else "peer",
        "listen/endpoints": [listen or "tcp/127.0.0.1:0"],
        "connect/endpoints": [] if listen else [router],
        "scouting/multicast/enabled": False,
        "scouting/delay": 0,  # ms to wait for peers that nobody looks for
        "timestamping/enabled": True,  # latched topics need it
        "connect/timeout_ms": 0 if listen else 3000,
        "connect/exit_on_failure": True,
        "transport/link/tx/queue/size/data": QUEUE,
        "transport/link/tx/queue/congestion_control/drop/wait_before_drop": round(BLOCKING * 1e6),  # [us]
    }
    for key, value in settings.items():
        config.insert_json5(key, json.dumps(value))
    return config
