"""Tests of the rosbridge transport: requests of the protocol, both spellings and lost connections."""

from urllib.parse import urlsplit

import pytest
from networks import free_port, until

from robopolicy.tokens import token_variable
from robopolicy_robots.codecs import json
from robopolicy_robots.messages import Bool, Header, JointState, String, Time
from robopolicy_robots.transports.base import LATCHED, SENSOR, TransportError

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
pytest.importorskip("websockets", reason="needs robopolicy[ros]")
from rosbridge_hub import Hub

from robopolicy_robots.transports.rosbridge import RosbridgeTransport


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the polling and retry periods."""
    for name in ("PEER_POLL_PERIOD", "RETRY"):
        monkeypatch.setattr(f"robopolicy_robots.transports.rosbridge.{name}", 0.05)


@pytest.mark.parametrize(("ros1", "name"), [(True, "sensor_msgs/JointState"), (False, "sensor_msgs/msg/JointState")])
def test_requests_follow_the_protocol(ros1: bool, name: str) -> None:
    hub = Hub()
    with RosbridgeTransport(hub.url, ros1=ros1) as transport:
        publisher = transport.advertise("/joint_states", JointState, LATCHED)
        subscription = transport.subscribe("/joint_states", JointState, SENSOR)
        until(lambda: "subscribe" in (each["op"] for each in hub.requests))
        requests = [each for each in hub.requests if each["op"] != "call_service"]
        start = {"topic": "/joint_states", "type": name}
        assert requests[0] == {**start, "op": "advertise", "latch": True, "queue_size": 1}
        assert requests[1] == {**start, "op": "subscribe", "queue_length": 1, "throttle_rate": 0}
        until(lambda: publisher.matched == subscription.publishers == 1)
        message = JointState(Header(Time(1, 2)), ("a",))
        publisher.publish(message)
        assert until(subscription.latest).message == message
        hub.inject("/joint_states", {**json.encode(message, ros1=not ros1), "extra": 1})
        assert until(lambda: (each := subscription.latest()) and each.sequence == 2 and each).message == message
    until(lambda: {"op": "unsubscribe", "topic": "/joint_states"} in hub.requests or not hub._clients)
    hub.stop()


def test_invalid_data_is_counted_or_ignored() -> None:
    hub = Hub()
    with RosbridgeTransport(hub.url) as transport:
        subscription = transport.subscribe("/status", String, SENSOR)
        until(lambda: hub.requests)
        for data in ("{", "[" * 100_000, "[]", "3", '{"op": "publish"}', '{"op": "status"}', b"\xff\xfe", "null"):
            hub.send_raw(data)
        for message in (None, {}, {"data": 1}, [], {"data": None}):
            before = subscription.malformed
            hub.inject("/status", message)
            until(lambda n=before: subscription.latest() is None and subscription.malformed == n + 1)
        hub.inject("/status", {"data": "up"})
        assert until(subscription.latest).message == String("up")
    hub.stop()


def test_without_rosapi_publishers_are_counted_from_recent_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robopolicy_robots.transports.rosbridge.PUBLISHER_TIMEOUT", 0.3)
    hub = Hub(rosapi=False)
    with RosbridgeTransport(hub.url) as transport:
        publisher = transport.advertise("/command", Bool, SENSOR)
        subscription = transport.subscribe("/status", String, SENSOR)
        until(lambda: len(hub.requests) >= 4)
        assert publisher.matched == 1 and subscription.publishers == 0
        hub.inject("/status", {"data": "up"})
        until(lambda: subscription.publishers == 1)
        until(lambda: subscription.publishers == 0)
    hub.stop()


def test_a_lost_connection_is_opened_again() -> None:
    hub = Hub()
    with RosbridgeTransport(hub.url) as transport:
        publisher = transport.advertise("/command", Bool, SENSOR)
        subscription = transport.subscribe("/status", String, SENSOR)
        hub_status = {"data": "up"}
        until(lambda: hub.subscribers("/status") == 1)
        hub.inject("/status", hub_status)
        first = until(subscription.latest)
        hub.stop()
        until(lambda: not publisher.matched)
        for _ in range(5):
            publisher.publish(Bool(True))  # lost, also after the reconnection
        again = Hub(hub.port)
        until(lambda: {each["op"] for each in again.requests} >= {"advertise", "subscribe"})
        again.inject("/status", hub_status)
        second = until(lambda: (each := subscription.latest()) and each is not first and each)
        assert second.publisher != first.publisher and second.message == first.message
        assert until(lambda: transport.graph().endpoints[0].publishes)
        again.stop()


def test_tokens_are_not_sent_over_unencrypted_remote_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    RosbridgeTransport(hub.url).close()
    monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
    RosbridgeTransport(hub.url).close()
    until(lambda: len(hub.headers) == 2)  # each connection has its own thread
    assert set(hub.headers) == {"Bearer secret", None}
    hub.stop()
    for url in ("ws://robot.local:9090", "ws://127.evil.example:9090", "ws://localhost.evil.example"):
        monkeypatch.setenv(str(token_variable(str(urlsplit(url).hostname))), "secret")
        with pytest.raises(TransportError, match="use wss://"):
            RosbridgeTransport(url, timeout=0.1)


@pytest.mark.parametrize("url", ["http://[::1", 5])
def test_an_address_that_is_none_is_refused(url: str | int) -> None:
    with pytest.raises(TransportError, match="is not an address"):
        RosbridgeTransport(url)  # type: ignore[arg-type]


def test_a_missing_server_is_reported() -> None:
    with pytest.raises(TransportError, match="No rosbridge server at ws://"):
        RosbridgeTransport(f"ws://127.0.0.1:{free_port()}")
