"""Transport to ROS 2 over Zenoh without a ROS installation, compatible with `rmw_zenoh` (Jazzy and later).

It connects to a Zenoh router (`rmw_zenohd` or `zenohd`), or is a router on this machine (`listen`). Subscriptions poll
a ring of samples, since a session with Python callbacks hangs at the exit of the interpreter if it was not closed.
Endpoints of any reliability and durability match, as in `rmw_zenoh`.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from robopolicy.optional import require
from robopolicy.tokens import is_loopback
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

ROUTER = "tcp/127.0.0.1:7447"  # default endpoint of rmw_zenohd
ATTACHMENT = struct.Struct("<QqB16s")  # sequence number, time of sending [ns], 16, identity of the publisher
QUEUE = 16  # maximum number of queued batches (the largest that Zenoh allows)
TOKENS = 256  # maximum number of unread changes of the graph


class _ZenohEnd:
    """Base class of publishers and subscriptions: declaration, token and peers."""

    _declared: Any  # publisher or subscriber of Zenoh
    _token: Any
    _remote: _Peers

    def _announce(self, transport: ZenohTransport, topic: str, kind: type[Message], reliable: bool, qos: QoS) -> None:
        ours, theirs = ("MP", "MS") if isinstance(self, Publisher) else ("MS", "MP")
        self._token = transport.announce(ours, topic, kind, reliable, qos.latched)
        self._remote = _Peers(transport, theirs, topic, kind)

    def _peers(self) -> tuple[str, ...]:
        return self._remote.matched()

    def _unmet(self) -> tuple[str, ...]:
        return self._remote.unmet()

    def _leave(self) -> None:
        self._token.undeclare()
        self._declared.undeclare()
        self._remote.close()


class ZenohPublisher(_ZenohEnd, Publisher[M]):
    """Publisher on the key of a topic."""

    def __init__(self, transport: ZenohTransport, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind)
        zenoh, session = require("zenoh", "ros"), transport.session
        prepare(kind)
        self._numbers, self._identity = itertools.count(1), os.urandom(16)
        options = {
            "express": True,  # no batching
            "congestion_control": zenoh.CongestionControl.DROP,  # instead of waiting for a slow peer
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
    """Subscription to the key of a topic."""

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
        domain: ROS_DOMAIN_ID; by default from the environment, or 0.
        router: Endpoint of the router to connect to.
        listen: Endpoint of this machine ("tcp/127.0.0.1:7447"), to be a router instead.
        node: Name of the ROS node.
    """

    module = "zenoh"
    extra = "ros"

    def __init__(
        self, domain: int | None = None, router: str = ROUTER, listen: str | None = None, node: str = "robopolicy"
    ) -> None:
        super().__init__()
        zenoh = require("zenoh", "ros")
        require("rosbags.typesys", "ros")  # for the codecs
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
        """Key of the samples of a topic."""
        return f"{self.domain}/{topic[1:]}/{dds_type(kind)}/{type_hash(kind)}"

    def announce(self, role: str, topic: str, kind: type[Message], reliable: bool, latched: bool) -> Any:
        """Declare the liveliness token of a publisher ("MP") or subscription ("MS")."""
        start = f"@ros2_lv/{self.domain}/{self.session.zid()}/0/{next(self._numbers)}/{role}/%/%/{self.node}"
        # Numbers in rmw's enumerations where they differ from the defaults of ROS, then a history of 1.
        quality = f"{'' if reliable else 2}:{1 if latched else ''}:,1:,:,:,,"
        token = f"{start}/{topic.replace('/', '%')}/{dds_type(kind)}/{type_hash(kind)}/{quality}"
        return self.session.liveliness().declare_token(token)

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> ZenohPublisher[M]:
        return ZenohPublisher(self, topic, kind, qos)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> ZenohSubscription[M]:
        return ZenohSubscription(self, topic, kind, qos)

    def _leave(self) -> None:
        self.session.close()


class _Peers:
    """Peers of a topic, from their tokens in a ring, since a full queue would stop the session."""

    def __init__(self, transport: ZenohTransport, role: str, topic: str, kind: type[Message]) -> None:
        zenoh = require("zenoh", "ros")
        key = f"@ros2_lv/{transport.domain}/*/*/*/{role}/*/*/*/{topic.replace('/', '%')}/*/*/*"
        ring = zenoh.handlers.RingChannel(TOKENS)
        self._changes: Any = transport.session.liveliness().declare_subscriber(key, ring, history=True)
        self._gone = zenoh.SampleKind.DELETE
        self._type = [dds_type(kind), type_hash(kind)]
        self._types: dict[str, list[str]] = {}

    def matched(self) -> tuple[str, ...]:
        """Peers with the same type, as session/node/entity; restarted peers have a new identity."""
        while (change := self._changes.try_recv()) is not None:
            words = str(change.key_expr).split("/")
            peer = "/".join(words[2:5])
            if change.kind == self._gone:
                self._types.pop(peer, None)
            else:
                self._types[peer] = words[-3:-1]
        return tuple(sorted(peer for peer, name in self._types.items() if name == self._type))

    def unmet(self) -> tuple[str, ...]:
        """Incompatible properties of other peers."""
        return ("type",) if len(self.matched()) < len(self._types) else ()

    def close(self) -> None:
        """Remove the subscription to tokens."""
        self._changes.undeclare()


def _config(zenoh: Any, router: str, listen: str | None) -> Any:
    try:
        host = "" if listen is None else urlsplit(f"//{str(listen).split('/', 1)[-1]}").hostname or ""
    except ValueError as error:
        raise TransportError(f"'{listen}' is no endpoint ({error}); pass e.g. tcp/127.0.0.1:7447.") from error
    if listen is not None and not is_loopback(host):
        raise TransportError(f"This process can only be a router on loopback; run zenohd to listen at {listen}.")
    config = zenoh.Config()
    settings: dict[str, Any] = {
        "mode": "router" if listen else "peer",
        "listen/endpoints": [listen or "tcp/127.0.0.1:0"],
        "connect/endpoints": [] if listen else [router],
        "scouting/multicast/enabled": False,
        "scouting/delay": 0,  # [ms] scouting is not used
        "timestamping/enabled": True,  # latched topics need it
        "connect/timeout_ms": 0 if listen else 3000,
        "connect/exit_on_failure": True,
        "transport/link/tx/queue/size/data": QUEUE,
        "transport/link/tx/queue/congestion_control/drop/wait_before_drop": round(BLOCKING * 1e6),  # [us]
    }
    for key, value in settings.items():
        config.insert_json5(key, json.dumps(value))
    return config
