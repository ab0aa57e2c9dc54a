"""Tests of the loopback transport and of opening transports by name."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy_robots.messages import Bool, Header, JointState, String, Time
from robopolicy_robots.transports import TRANSPORTS
from robopolicy_robots.transports.base import (
    COMMAND,
    IMAGE,
    LATCHED,
    SENSOR,
    QoS,
    TransportError,
    open_transport,
    unmet,
)
from robopolicy_robots.transports.loopback import LoopbackTransport


def test_the_newest_message_arrives_as_a_copy() -> None:
    with LoopbackTransport(1) as robot, LoopbackTransport(1) as bridge, LoopbackTransport(2) as elsewhere:
        publisher = robot.advertise("/joint_states", JointState, SENSOR)
        subscription = bridge.subscribe("/joint_states", JointState, SENSOR)
        other_domain = elsewhere.subscribe("/joint_states", JointState, SENSOR)
        assert (publisher.matched, subscription.publishers, other_domain.publishers) == (1, 1, 0)
        assert subscription.latest() is None
        position = np.zeros(2)
        before = time.monotonic()
        for count in range(3):
            position[:] = count
            publisher.publish(JointState(Header(Time(5, 500_000_000)), ("a", "b"), position))
        position[:] = -1
        received = subscription.latest()
        assert received is not None and received.sequence == 1 and received.stamp == 5.5
        assert before <= received.received <= time.monotonic() and subscription.latest() is received
        np.testing.assert_array_equal(received.message.position, [2, 2])
        assert other_domain.latest() is None


def test_publishers_have_distinct_identities() -> None:
    with LoopbackTransport() as robot, LoopbackTransport() as bridge:
        subscription = bridge.subscribe("/status", String, SENSOR)
        first, second = (robot.advertise("/status", String, SENSOR) for _ in range(2))
        assert subscription.publishers == 2
        names = []
        for publisher in (first, second, first):
            publisher.publish(String("x"))
            names.append(subscription.latest().publisher)  # type: ignore[union-attr]
        assert names[0] == names[2] != names[1]
        assert sorted(bridge.graph().endpoints[0].matched) == sorted(set(names))


def test_a_restarted_publisher_has_a_new_identity() -> None:
    with LoopbackTransport() as bridge:
        subscription, seen = bridge.subscribe("/status", String, SENSOR), set()
        for _ in range(3):
            with LoopbackTransport() as robot:
                robot.advertise("/status", String, SENSOR).publish(String("up"))
            seen.add(subscription.latest().publisher)  # type: ignore[union-attr]
            assert subscription.publishers == 0
        assert len(seen) == 3


@pytest.mark.parametrize("offers", [SENSOR, IMAGE, COMMAND, LATCHED])
@pytest.mark.parametrize("asks", [SENSOR, IMAGE, COMMAND, LATCHED])
def test_a_subscription_matches_only_an_offered_quality_of_service(offers: QoS, asks: QoS) -> None:
    with LoopbackTransport() as robot, LoopbackTransport() as bridge:
        publisher = robot.advertise("/stop", Bool, offers)
        publisher.publish(Bool(True))
        subscription = bridge.subscribe("/stop", Bool, asks)
        matches = not unmet(asks, offers)
        late = subscription.latest()
        assert (late is not None) == (matches and asks.latched)
        publisher.publish(Bool(False))
        assert (subscription.latest() is not None) == matches == bool(publisher.matched)
        (endpoint,) = bridge.graph().endpoints
        assert endpoint.unmet == unmet(asks, offers) and len(endpoint.matched) == matches


def test_unmet_lists_the_missing_policies() -> None:
    assert unmet(LATCHED, IMAGE) == ("durability", "reliability")
    assert unmet(COMMAND, IMAGE) == ("reliability",) and unmet(LATCHED, COMMAND) == ("durability",)
    assert not unmet(SENSOR, IMAGE) and not unmet(IMAGE, LATCHED)


def test_another_type_does_not_match() -> None:
    with LoopbackTransport() as robot:
        robot.advertise("/stop", String, SENSOR)
        assert robot.subscribe("/stop", Bool, SENSOR).publishers == 0
        assert [endpoint.unmet for endpoint in robot.graph().endpoints] == [("type",), ("type",)]


def test_publishing_another_type_is_refused() -> None:
    with (
        LoopbackTransport() as robot,
        pytest.raises(TransportError, match="/stop has type std_msgs/msg/Bool, not String"),
    ):
        robot.advertise("/stop", Bool, SENSOR).publish(String("x"))  # type: ignore[arg-type]


def test_threads_may_publish_and_read_at_once() -> None:
    with LoopbackTransport() as robot:
        subscription = robot.subscribe("/status", String, SENSOR)

        def work() -> None:
            with LoopbackTransport() as transport:
                publisher = transport.advertise("/status", String, SENSOR)
                for _ in range(200):
                    publisher.publish(String("x"))
                    seen.append(subscription.latest() is not None)

        seen: list[bool] = []
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 800 and all(seen) and subscription.publishers == 0


def test_a_closed_transport_raises() -> None:
    transport = LoopbackTransport()
    publisher = transport.advertise("/status", String, SENSOR)
    transport.close()
    transport.close()
    for use in (transport.graph, lambda: publisher.publish(String()), lambda: publisher.matched):
        with pytest.raises(TransportError, match="closed"):
            use()


def test_transports_are_opened_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_transport("loopback", domain=3) as transport:
        assert isinstance(transport, LoopbackTransport)
    with pytest.raises(UserError, match="Did you mean 'loopback'"):
        open_transport("lopback")
    with pytest.raises(UserError, match=r"Unknown setting 'domian' of transport loopback\. Did you mean 'domain'"):
        open_transport("loopback", domian=3)
    monkeypatch.delenv("ROS_DISTRO", raising=False)
    with pytest.raises(TransportError, match="choose a transport: dds, lerobot"):
        open_transport("auto")
    monkeypatch.setenv("ROS_DISTRO", "jazzy")  # a distribution without its Python package does not count
    with pytest.raises(TransportError, match="choose a transport"):
        open_transport("auto")


def test_transports_and_codecs_import_neither_torch_nor_mujoco() -> None:
    modules = ", ".join(f"robopolicy_robots.transports.{name}" for name in (*TRANSPORTS.product(), "faults"))
    codecs = ", ".join(f"robopolicy_robots.codecs.{name}" for name in ("cdr", "ros1", "json", "native"))
    check = "assert not {'torch', 'mujoco', 'rosbags', 'cyclonedds', 'zenoh', 'websockets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}, {codecs}; {check}"], check=True, timeout=60)
