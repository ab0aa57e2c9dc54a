"""Conformance tests that every transport passes."""

import time

import numpy as np
import pytest
from networks import Network, until
from random_messages import random_message

from robopolicy_robots.message import Message
from robopolicy_robots.messages import (
    Bool,
    CompressedImage,
    Float64MultiArray,
    Header,
    Image,
    JointState,
    JointTrajectory,
    JointTrajectoryPoint,
    Odometry,
    String,
    Time,
    Twist,
)
from robopolicy_robots.transports.base import COMMAND, IMAGE, LATCHED, SENSOR, TransportError

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
pytestmark = pytest.mark.parametrize("network", ["loopback", "dds", "zenoh", "rosbridge"], indirect=True)
TRAJECTORY = JointTrajectory(Header(), ("a", "b"), (JointTrajectoryPoint(np.array([1.0, 2.0])),))


def state(number: int, size: int = 2) -> JointState:
    return JointState(Header(Time(number), "base"), tuple("abcdefg"[:size]), np.full(size, float(number)))


@pytest.mark.parametrize(
    "kind", [JointState, JointTrajectory, Float64MultiArray, Image, CompressedImage, Twist, Bool, String, Odometry]
)
def test_messages_arrive_unchanged(network: Network, kind: type[Message]) -> None:
    robot, bridge = network.open(), network.open()
    publisher = robot.advertise("/arm/topic_1", kind, SENSOR)
    subscription = bridge.subscribe("/arm/topic_1", kind, SENSOR)
    until(lambda: publisher.matched == subscription.publishers == 1)
    assert subscription.latest() is None
    generator = np.random.default_rng(0)
    for number in range(1, 4):
        message = random_message(kind, generator, finite=True)
        before = time.monotonic()
        publisher.publish(message)
        received = until(lambda n=number: (each := subscription.latest()) and each.sequence == n and each)
        assert received.message == message
        assert before <= received.received <= time.monotonic() and subscription.latest() is received
    assert subscription.malformed == 0


def test_received_messages_have_stamps_and_publisher_identities(network: Network) -> None:
    robot, bridge = network.open(), network.open()
    publisher = robot.advertise("/joint_states", JointState, SENSOR)
    subscription = bridge.subscribe("/joint_states", JointState, SENSOR)
    until(lambda: publisher.matched == subscription.publishers == 1)
    seen = []
    for stamp in (Time(3, 500_000_000), Time()):
        publisher.publish(JointState(Header(stamp)))
        seen.append(until(lambda: (each := subscription.latest()) and each.sequence == len(seen) + 1 and each))
    assert [each.stamp for each in seen] == [3.5, None]
    assert seen[0].publisher == seen[1].publisher
    for transport in (bridge, robot):  # a server of rosbridge may have listed the peers before both were there
        until(lambda transport=transport: len(transport.graph().endpoints[0].matched) == 1)
    reader, writer = bridge.graph().endpoints[0], robot.graph().endpoints[0]
    assert (reader.topic, reader.type, reader.publishes) == ("/joint_states", "sensor_msgs/msg/JointState", False)
    assert writer.publishes and not reader.unmet


def test_no_backlog_builds_up(network: Network) -> None:
    robot, bridge = network.open(), network.open()
    publisher = robot.advertise("/joint_states", JointState, SENSOR)
    subscription = bridge.subscribe("/joint_states", JointState, SENSOR)
    until(lambda: publisher.matched == subscription.publishers == 1)
    for number in range(1, 501):
        publisher.publish(state(number))
    until(lambda: (each := subscription.latest()) and each.stamp == 500)
    time.sleep(0.05)
    received = subscription.latest()
    assert received is not None and received.stamp == 500  # nothing older comes after it


def test_messages_between_two_polls_are_not_lost(network: Network) -> None:
    robot, bridge = network.open(), network.open()
    publisher = robot.advertise("/estop", Bool, LATCHED)
    subscription = bridge.subscribe("/estop", Bool, LATCHED)
    until(lambda: publisher.matched == subscription.publishers == 1)
    for pressed in (False, True, False):
        publisher.publish(Bool(pressed))
        time.sleep(0.03)  # publishers store only the newest message
    until(lambda: (each := subscription.latest()) and each.sequence == 3)
    assert [each.message.data for each in subscription.unread()] == [False, True, False]
    assert subscription.unread() == () and subscription.latest() is not None


def test_a_second_publisher_is_counted(network: Network) -> None:
    bridge = network.open()
    subscription = bridge.subscribe("/joint_states", JointState, SENSOR)
    first, second = (network.open().advertise("/joint_states", JointState, SENSOR) for _ in range(2))
    until(lambda: subscription.publishers == 2 and first.matched == second.matched == 1)
    if network.name != "rosbridge":  # which does not report the publisher
        names = set()
        for number, publisher in enumerate((first, second, first), 1):
            publisher.publish(state(number))
            names.add(until(lambda n=number: (each := subscription.latest()) and each.stamp == n and each).publisher)
        assert len(names) == 2
    network.opened[-1].close()
    until(lambda: subscription.publishers == 1)


def test_a_reconnected_publisher_has_a_new_identity(network: Network) -> None:
    if network.name == "rosbridge":
        pytest.skip("rosbridge does not tell who sent a message")
    subscription, names = network.open().subscribe("/joint_states", JointState, SENSOR), set()
    for number in range(1, 4):
        robot = network.open()
        publisher = robot.advertise("/joint_states", JointState, SENSOR)
        until(lambda p=publisher: p.matched == subscription.publishers == 1)
        publisher.publish(state(number))
        names.add(until(lambda n=number: (each := subscription.latest()) and each.stamp == n and each).publisher)
        robot.close()
        until(lambda: subscription.publishers == 0)
    assert len(names) == 3


def test_late_subscribers_receive_latched_messages(network: Network) -> None:
    robot = network.open()
    stop, command = (robot.advertise(topic, Bool, qos) for topic, qos in (("/stop", LATCHED), ("/go", COMMAND)))
    for message in (Bool(True), Bool(False), Bool(True)):
        stop.publish(message)
        command.publish(message)
    if network.name in ("zenoh", "rosbridge"):
        time.sleep(0.3)  # let the messages leave before the subscription
    bridge = network.open()
    late, never = (bridge.subscribe(topic, Bool, qos) for topic, qos in (("/stop", LATCHED), ("/go", COMMAND)))
    assert until(lambda: late.latest()).message == Bool(True)
    until(lambda: never.publishers == 1)
    time.sleep(0.1)
    assert never.latest() is None


def test_commands_reach_the_robot(network: Network) -> None:
    robot, bridge = network.open(), network.open()
    publisher = bridge.advertise("/arm/joint_trajectory", JointTrajectory, COMMAND)
    subscription = robot.subscribe("/arm/joint_trajectory", JointTrajectory, COMMAND)
    until(lambda: publisher.matched == subscription.publishers == 1)
    publisher.publish(TRAJECTORY)
    assert until(subscription.latest).message == TRAJECTORY


def test_images_arrive_unchanged(network: Network) -> None:
    robot, bridge = network.open(), network.open()
    publisher = robot.advertise("/camera", Image, IMAGE)
    subscription = bridge.subscribe("/camera", Image, IMAGE)
    until(lambda: publisher.matched == subscription.publishers == 1)
    pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    message = Image.from_pixels(pixels, Header(Time(1)))

    def arrived() -> bool:
        publisher.publish(message)  # best effort: once may not be enough
        time.sleep(0.02)
        return subscription.latest() is not None

    until(arrived)
    np.testing.assert_array_equal(subscription.latest().message.pixels, pixels)  # type: ignore[union-attr]


def test_publishing_does_not_block(network: Network) -> None:
    robot = network.open()
    publisher = robot.advertise("/camera", Image, SENSOR)
    subscription = network.open().subscribe("/camera", Image, SENSOR)
    until(lambda: publisher.matched == subscription.publishers == 1)
    message = Image.from_pixels(np.zeros((224, 224, 3), np.uint8), Header(Time(1)))
    taken = []
    for _ in range(50):  # no subscriber reads
        start = time.monotonic()
        publisher.publish(message)
        taken.append(time.monotonic() - start)
    assert sorted(taken)[25] < 0.01


def test_invalid_topics_and_types_are_refused(network: Network) -> None:
    transport = network.open()
    for topic in ("joint_states", "/joint states", "/a//b", "/", ""):
        with pytest.raises(TransportError, match="absolute topic"):
            transport.subscribe(topic, JointState, SENSOR)
    publisher = transport.advertise("/joint_states", JointState, SENSOR)
    with pytest.raises(TransportError, match="has type sensor_msgs/msg/JointState, not String"):
        publisher.publish(String("x"))  # type: ignore[arg-type]


def test_a_closed_transport_raises(network: Network) -> None:
    transport = network.open()
    publisher = transport.advertise("/a", Bool, SENSOR)
    subscription = transport.subscribe("/b", Bool, SENSOR)
    transport.close()
    transport.close()
    uses = (transport.graph, lambda: publisher.publish(Bool()), lambda: publisher.matched, subscription.latest)
    for use in (*uses, lambda: subscription.publishers, lambda: transport.advertise("/a", Bool, SENSOR)):
        with pytest.raises(TransportError, match="closed"):
            use()


def test_a_topic_without_peers_is_not_an_error(network: Network) -> None:
    transport = network.open()
    publisher = transport.advertise("/nobody", Bool, COMMAND)
    subscription = transport.subscribe("/never", Bool, SENSOR)
    for _ in range(20):
        publisher.publish(Bool(True))
    assert subscription.latest() is None and subscription.publishers == 0
