"""Tests of the Zenoh transport against a bare session: keys, attachments and tokens of rmw_zenoh."""

import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from networks import free_port, until

from robopolicy_robots.codecs import cdr
from robopolicy_robots.codecs.definitions import type_hash
from robopolicy_robots.messages import JointState, String
from robopolicy_robots.transports.base import IMAGE, LATCHED, SENSOR, TransportError

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
pytest.importorskip("zenoh", reason="needs robopolicy[ros]")
import zenoh

from robopolicy_robots.transports.zenoh import ZenohTransport

HASH = type_hash(String)
KEY = f"7/arm/status/std_msgs::msg::dds_::String_/{HASH}"


@pytest.fixture
def router() -> str:
    return f"tcp/127.0.0.1:{free_port()}"


@pytest.fixture
def transport(router: str) -> Iterator[ZenohTransport]:
    with ZenohTransport(domain=7, listen=router, node="bridge") as opened:
        yield opened


@pytest.fixture
def peer(router: str, transport: ZenohTransport) -> Iterator[Any]:
    config = zenoh.Config()
    for key, value in (
        ("connect/endpoints", f'["{router}"]'),
        ("scouting/multicast/enabled", "false"),
        ("listen/endpoints", '["tcp/127.0.0.1:0"]'),
    ):
        config.insert_json5(key, value)
    with zenoh.open(config) as session:
        yield session


def test_liveliness_tokens_match_rmw_zenoh(transport: ZenohTransport, peer: Any) -> None:
    transport.advertise("/arm/status", String, SENSOR)
    transport.subscribe("/arm/stop", String, LATCHED)
    transport.subscribe("/camera", String, IMAGE)

    def tokens() -> list[str]:
        return sorted(str(reply.ok.key_expr) for reply in peer.liveliness().get("@ros2_lv/**") if reply.ok)

    until(lambda: len(tokens()) == 4)
    start = f"@ros2_lv/7/{transport.session.zid()}/0"
    kind = f"std_msgs::msg::dds_::String_/{HASH}"
    assert tokens() == sorted(
        [
            f"{start}/0/NN/%/%/bridge",
            f"{start}/1/MP/%/%/bridge/%arm%status/{kind}/::,1:,:,:,,",
            f"{start}/2/MS/%/%/bridge/%arm%stop/{kind}/:1:,1:,:,:,,",
            f"{start}/3/MS/%/%/bridge/%camera/{kind}/2::,1:,:,:,,",
        ]
    )


def test_samples_match_rmw_zenoh(transport: ZenohTransport, peer: Any) -> None:
    publisher = transport.advertise("/arm/status", String, SENSOR)
    ring = zenoh.handlers.RingChannel(8)
    subscriber = peer.declare_subscriber(KEY, ring)
    samples = []

    def arrived() -> bool:
        publisher.publish(String("up"))
        time.sleep(0.01)
        if (sample := subscriber.try_recv()) is not None:
            samples.append(sample)
        return len(samples) == 2

    until(arrived)
    assert samples[0].payload.to_bytes() == cdr.encode(String("up"))
    fields = [struct.unpack("<qqB16s", sample.attachment.to_bytes()) for sample in samples]
    assert fields[1][0] > fields[0][0] and abs(fields[0][1] / 1e9 - time.time()) < 10
    assert fields[0][2:] == fields[1][2:] and fields[0][2] == 16


def test_samples_of_a_bare_session_arrive_and_invalid_ones_are_counted(transport: ZenohTransport, peer: Any) -> None:
    subscription = transport.subscribe("/arm/status", String, SENSOR)
    attachment = struct.pack("<qqB16s", 1, 2, 16, bytes(range(16)))
    token = f"@ros2_lv/7/{peer.zid()}/0/9/MP/%/%/robot/%arm%status/std_msgs::msg::dds_::String_/{HASH}/::,10:,:,:,,"
    with peer.liveliness().declare_token(token):
        until(lambda: subscription.publishers == 1)
        for number, (data, extra) in enumerate(
            [(b"", attachment), (b"\0\1\0\0\xff", attachment), (cdr.encode(String("x")), b"short")], 1
        ):
            peer.put(KEY, data, attachment=extra)
            until(lambda n=number: subscription.latest() is None and subscription.malformed == n)
        peer.put(KEY, cdr.encode(String("x")))  # early rmw_zenoh used another attachment
        until(lambda: subscription.latest() is None and subscription.malformed == 4)
        peer.put(KEY, cdr.encode(String("x")), attachment=attachment)
        assert until(subscription.latest).publisher == bytes(range(16)).hex()
    until(lambda: subscription.publishers == 0)


def test_another_type_does_not_match(transport: ZenohTransport) -> None:
    subscription = transport.subscribe("/arm/status", String, SENSOR)
    publisher = transport.advertise("/arm/status", JointState, SENSOR)
    until(lambda: all(end.unmet == ("type",) for end in transport.graph().endpoints))
    assert subscription.publishers == publisher.matched == 0


def test_a_remote_listen_address_is_refused() -> None:
    for endpoint in ("tcp/0.0.0.0:7447", "tcp/[::]:7447", "tcp/192.168.1.2:7447"):
        with pytest.raises(TransportError, match="run zenohd to listen at"):
            ZenohTransport(listen=endpoint)


def test_a_listen_address_that_is_none_is_refused() -> None:
    with pytest.raises(TransportError, match="is no endpoint"):
        ZenohTransport(listen="tcp/[::1")


def test_a_missing_router_is_reported(router: str) -> None:
    with pytest.raises(TransportError, match=f"No Zenoh router at {router}"):
        ZenohTransport(router=router)


SCRIPT = """
import sys
from robopolicy_robots.messages import String
from robopolicy_robots.transports.base import SENSOR
from robopolicy_robots.transports.zenoh import ZenohTransport
transport = ZenohTransport(listen=sys.argv[1])
transport.subscribe("/status", String, SENSOR)
raise SystemExit(3)
"""


def test_a_process_that_does_not_close_the_transport_still_exits(router: str) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, router], timeout=30, check=False)
    assert run.returncode == 3
