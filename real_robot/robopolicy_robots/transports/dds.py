"""Transport to ROS 2 over DDS without a ROS installation: Cyclone DDS with the names, types and QoS of ROS 2.

Names, type hashes and encoding are compatible with `rmw_cyclonedds` and `rmw_fastrtps`. The endpoints of a process are
announced under the node `/robopolicy`, so that `ros2 node list` and `ros2 node info` of Iron and later show them;
services and actions are not announced. Readers are polled without listeners, since a Python listener suppresses
exceptions and may crash at shutdown. `Received.received` is the time of the poll, so ages are exact to one control
period.

DDS detects only after its lease (10 s) that a peer has ended, and a new process on the same topic is another publisher,
so ages and identities must be checked in addition to the number of publishers.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from robopolicy.optional import require
from robopolicy_robots.codecs import cdr
from robopolicy_robots.codecs.definitions import describe, prepare, type_hash
from robopolicy_robots.message import Message, array
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
from robopolicy_robots.transports.names import dds_topic, dds_type

NANO = 10**9
TIMEOUT = -10  # return code of a write that would have to wait longer
POLICIES = {2: "durability", 4: "deadline", 8: "liveliness", 11: "reliability", 23: "representation"}  # standard ids
DISCOVERY, NODE = "ros_discovery_info", "robopolicy"  # DDS topic without "rt/", and name of our node
BATCH = 16  # maximum number of samples per poll


@dataclass(frozen=True, eq=False)
class Gid(Message):
    """Id of a participant, reader or writer: its DDS GUID."""

    ros_name: ClassVar[str] = "rmw_dds_common/msg/Gid"
    data: NDArray[np.uint8] = array(np.uint8, 16)  # noqa: RUF009 -- a field


@dataclass(frozen=True, eq=False)
class NodeEntitiesInfo(Message):
    """Endpoints of a node."""

    ros_name: ClassVar[str] = "rmw_dds_common/msg/NodeEntitiesInfo"
    node_namespace: str = ""
    node_name: str = ""
    reader_gid_seq: tuple[Gid, ...] = ()
    writer_gid_seq: tuple[Gid, ...] = ()


@dataclass(frozen=True, eq=False)
class ParticipantEntitiesInfo(Message):
    """Nodes of a participant; each message replaces the one before."""

    ros_name: ClassVar[str] = "rmw_dds_common/msg/ParticipantEntitiesInfo"
    gid: Gid = field(default_factory=Gid)
    node_entities_info_seq: tuple[NodeEntitiesInfo, ...] = ()


def cyclone_settings(interface: str) -> str:
    """Settings of Cyclone DDS for a network interface, as in `CYCLONEDDS_URI`; "lo" restricts it to this machine."""
    local = interface == "lo"
    peers = '<Peers><Peer Address="127.0.0.1"/></Peers>' if local else ""
    multicast = f"<AllowMulticast>{str(not local).lower()}</AllowMulticast>"
    index = "<ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>40</MaxAutoParticipantIndex>"
    return (
        f'<CycloneDDS><Domain id="any"><General><Interfaces><NetworkInterface name="{interface}"/></Interfaces>'
        f"{multicast}</General><Discovery>{index if local else ''}{peers}</Discovery></Domain></CycloneDDS>"
    )


class _Participant:
    """DDS participant of this process in a domain, shared by all transports to limit discovery traffic."""

    def __init__(self, domain: int, interface: str) -> None:
        dds, core = require("cyclonedds.domain", "ros"), require("cyclonedds.core", "ros")
        self.interface = interface
        configured = os.environ.get("CYCLONEDDS_URI")
        if not configured and interface not in (known := [name for _, name in socket.if_nameindex()]):
            raise TransportError(f"Unknown network interface '{interface}'; this machine has {', '.join(known)}.")
        try:
            self._domain = None if configured else dds.Domain(domain, cyclone_settings(interface))
            self.entity = dds.DomainParticipant(domain, qos=core.Qos(core.Policy.Userdata(b"enclave=/;")))
        except core.DDSException as error:
            text = f"DDS cannot join domain {domain} on interface '{interface}': {_line(error)}"
            raise TransportError(text) from error
        self.topics: dict[str, Any] = {}
        self._readers: dict[bytes, Any] = {}  # by id
        self._writers: dict[bytes, Any] = {}
        topic = require("cyclonedds.topic", "ros").Topic(self.entity, DISCOVERY, idl_type(ParticipantEntitiesInfo))
        quality = _quality(ParticipantEntitiesInfo, reliable=True, latched=True)
        self._graph: Any = require("cyclonedds.pub", "ros").DataWriter(self.entity, topic, qos=quality)
        self._announce()

    def add(self, entity: Any, *, writes: bool) -> None:
        """Announce an endpoint of the node."""
        (self._writers if writes else self._readers)[_gid(entity)] = entity
        self._announce()

    def remove(self, entity: Any) -> None:
        """Announce that an endpoint has been closed."""
        for known in (self._readers, self._writers):
            known.pop(_gid(entity), None)
        self._announce()

    def _announce(self) -> None:
        readers, writers = (tuple(map(Gid, map(_octets, known))) for known in (self._readers, self._writers))
        node = NodeEntitiesInfo("/", NODE, readers, writers)
        sample = object.__new__(idl_type(ParticipantEntitiesInfo))
        sample.data = cdr.encode(ParticipantEntitiesInfo(Gid(_octets(_gid(self.entity))), (node,)))
        self._graph.write(sample)

    def topic(self, name: str, kind: type[Message]) -> Any:
        """Return the topic, created on first use."""
        if name not in self.topics:
            self.topics[name] = require("cyclonedds.topic", "ros").Topic(self.entity, dds_topic(name), idl_type(kind))
        if (topic := self.topics[name]).data_type is not idl_type(kind):
            raise TransportError(f"{name} has type {topic.data_type.ros_name} in this process, not {kind.ros_name}.")
        return topic


_participants: weakref.WeakValueDictionary[int, _Participant] = weakref.WeakValueDictionary()  # by domain


class _Raw:
    """Undecoded sample and its metadata."""

    sample_info: Any

    def __init__(self, data: bytes) -> None:
        self.data = data


class DdsPublisher(Publisher[M]):
    """Publisher with a DDS writer."""

    def __init__(self, participant: _Participant, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind)
        entity = participant.topic(topic, kind)
        self._sample = object.__new__(entity.data_type)
        settings = _quality(kind, qos.offers_reliable, qos.latched)
        self._writer: Any = require("cyclonedds.pub", "ros").DataWriter(participant.entity, entity, qos=settings)
        self._failure = require("cyclonedds.core", "ros").DDSException
        self._participant: Any = participant
        participant.add(self._writer, writes=True)

    def _send(self, message: M) -> None:
        self._sample.data = cdr.encode(message)
        try:
            self._writer.write(self._sample)
        except self._failure as error:
            if error.code != TIMEOUT:
                raise TransportError(f"DDS cannot write to {self.topic}: {_line(error)}") from error

    def _peers(self) -> tuple[str, ...]:
        return tuple(map(_identity, self._writer.get_matched_subscriptions()))

    def _unmet(self) -> tuple[str, ...]:
        return _policy(self._writer.get_offered_incompatible_qos_status())

    def _leave(self) -> None:
        self._participant.remove(self._writer)
        self._writer = self._participant = None


class DdsSubscription(Subscription[M]):
    """Subscription with a DDS reader."""

    def __init__(self, participant: _Participant, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        settings = _quality(kind, qos.requests_reliable, qos.latched, qos.depth)
        entity = participant.topic(topic, kind)
        self._reader: Any = require("cyclonedds.sub", "ros").DataReader(participant.entity, entity, qos=settings)
        self._participant: Any = participant
        participant.add(self._reader, writes=False)

    def _arrived(self) -> list[Arrival]:
        now = time.monotonic()
        return [
            Arrival(sample.data, now, _identity(sample.sample_info.publication_handle))
            for sample in self._reader.take(BATCH)
            if isinstance(sample, _Raw)  # a sample without data reports that a peer left
        ]

    def _read(self, data: bytes) -> M:
        return cdr.decode(self.kind, data)

    def _peers(self) -> tuple[str, ...]:
        return tuple(map(_identity, self._reader.get_matched_publications()))

    def _unmet(self) -> tuple[str, ...]:
        return _policy(self._reader.get_requested_incompatible_qos_status())

    def _leave(self) -> None:
        self._participant.remove(self._reader)
        self._reader = self._participant = None


class DdsTransport(Transport):
    """ROS 2 over DDS.

    Args:
        domain: ROS_DOMAIN_ID; by default from the environment, or 0.
        interface: Network interface; loopback by default. `CYCLONEDDS_URI` takes precedence.
    """

    module = "cyclonedds"
    extra = "ros"

    def __init__(self, domain: int | None = None, interface: str = "lo") -> None:
        super().__init__()
        require("rosbags.typesys", "ros")  # for the codecs
        domain = ros_domain(domain)
        participant = _participants.get(domain) or _Participant(domain, interface)
        if participant.interface != interface:
            raise TransportError(f"Domain {domain} is already used on interface '{participant.interface}'.")
        _participants[domain] = participant
        self._participant: Any = participant

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> DdsPublisher[M]:
        return DdsPublisher(self._participant, topic, kind, qos)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> DdsSubscription[M]:
        return DdsSubscription(self._participant, topic, kind, qos)

    def _leave(self) -> None:
        self._participant = None  # DDS entities are deleted with their last reference


@cache
def idl_type(kind: type[Message]) -> Any:
    """Type for Cyclone DDS; its samples are bytes, since the codec of Cyclone DDS is a hundred times slower.

    The extensibility is final, as in ROS; an appendable type would offer XCDR2 and never match.
    """
    idl, annotations = require("cyclonedds.idl", "ros"), require("cyclonedds.idl.annotations", "ros")
    prepare(kind)
    members = {each.name: _member(each) for each in describe(kind)}
    struct = annotations.final(idl.make_idl_struct(f"{kind.__name__}_", dds_type(kind), members))
    struct.ros_name = kind.ros_name
    struct.serialize = lambda self, **_: self.data
    struct.deserialize = staticmethod(lambda data, **_: _Raw(data))
    struct.deserialize_key = staticmethod(lambda data, **_: None)
    return struct


def _member(each: Any) -> Any:
    types = require("cyclonedds.idl.types", "ros")
    if isinstance(each.base, type):
        base = idl_type(each.base)
    else:
        text = types.bounded_str[each.bound] if each.bound else str
        base = {"string": text, "bool": bool, "byte": types.uint8}.get(each.base)
        base = base or getattr(types, each.base)
    if not each.many:
        return base
    return types.sequence[base] if each.size is None else types.array[base, each.size]


def _quality(kind: type[Message], reliable: bool, latched: bool, depth: int = 1) -> Any:
    core = require("cyclonedds.core", "ros")
    policy = core.Policy
    return core.Qos(
        policy.Reliability.Reliable(round(BLOCKING * NANO)) if reliable else policy.Reliability.BestEffort,
        policy.Durability.TransientLocal if latched else policy.Durability.Volatile,
        policy.History.KeepLast(depth),
        policy.DataRepresentation(use_cdrv0_representation=True),
        policy.Userdata(f"typehash={type_hash(kind)};".encode()),
    )


def _policy(status: Any) -> tuple[str, ...]:
    policy = status.last_policy_id
    return (POLICIES.get(policy, f"policy {policy}"),) if status.total_count else ()


def _gid(entity: Any) -> bytes:
    return bytes(entity.guid.bytes)


def _octets(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _identity(handle: int) -> str:
    return f"{handle & 2**64 - 1:016x}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
