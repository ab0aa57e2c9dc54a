"""Tests of the rclpy transport against a stand-in: its calls to ROS, and threads that end."""

import sys
import threading
import time
import types
from typing import Any

import pytest
from networks import until

from robopolicy_robots.codecs import native
from robopolicy_robots.messages import JointState, String
from robopolicy_robots.transports.base import COMMAND, LATCHED, SENSOR, TransportError, open_transport

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")


class FakeNode:
    """A node that delivers every published message to the subscriptions of its topic when spun."""

    def __init__(self, name: str) -> None:
        self.name, self.destroyed = name, False
        self.publishers: list[Any] = []
        self.subscriptions: list[Any] = []
        self.waiting: list[tuple[Any, Any]] = []

    def create_publisher(self, kind: type, topic: str, profile: Any) -> Any:
        made = types.SimpleNamespace(kind=kind, topic=topic, profile=profile, endpoint_gid=[len(self.publishers)] * 16)
        made.get_subscription_count = lambda: len(self.get_subscriptions_info_by_topic(topic))
        made.publish = lambda message: self.waiting.extend((s, message) for s in self.subscriptions if s.topic == topic)
        self.publishers.append(made)
        return made

    def create_subscription(self, kind: type, topic: str, callback: Any, profile: Any) -> Any:
        made = types.SimpleNamespace(kind=kind, topic=topic, callback=callback, profile=profile, endpoint_gid=[9] * 16)
        self.subscriptions.append(made)
        return made

    def get_publishers_info_by_topic(self, topic: str) -> list[Any]:
        return [each for each in self.publishers if each.topic == topic]

    def get_subscriptions_info_by_topic(self, topic: str) -> list[Any]:
        return [each for each in self.subscriptions if each.topic == topic]

    def destroy_publisher(self, publisher: Any) -> None:
        self.publishers.remove(publisher)

    def destroy_subscription(self, subscription: Any) -> None:
        self.subscriptions.remove(subscription)

    def destroy_node(self) -> None:
        self.destroyed = True


class FakeExecutor:
    """An executor that spins one node."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def add_node(self, node: FakeNode) -> None:
        self.node = node

    def spin_once(self, timeout_sec: float) -> None:
        time.sleep(0.001)
        while self.node.waiting:
            subscription, message = self.node.waiting.pop(0)
            subscription.callback(message)

    def shutdown(self) -> None:
        self.context.spinning = False


class FakeContext:
    """A ROS context."""

    def __init__(self) -> None:
        self.domain: Any = "none yet"
        self.ended = False

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> list[FakeNode]:
    """Return the list of nodes that the stand-in creates."""
    nodes: list[FakeNode] = []

    def create_node(name: str, context: FakeContext) -> FakeNode:
        assert context.domain != "none yet"
        nodes.append(FakeNode(name))
        return nodes[-1]

    def init(context: FakeContext, domain_id: int | None) -> None:
        context.domain = domain_id

    def policy(*names: str) -> Any:
        return types.SimpleNamespace(**{name: name for name in names})

    qos = types.SimpleNamespace(
        QoSProfile=lambda **settings: settings,
        HistoryPolicy=policy("KEEP_LAST"),
        ReliabilityPolicy=policy("RELIABLE", "BEST_EFFORT"),
        DurabilityPolicy=policy("TRANSIENT_LOCAL", "VOLATILE"),
    )
    rclpy: Any = types.ModuleType("rclpy")
    rclpy.init, rclpy.create_node = init, create_node
    rclpy.__spec__ = types.SimpleNamespace(name="rclpy")
    for name, content in {
        "rclpy": rclpy,
        "rclpy.context": types.SimpleNamespace(Context=FakeContext),
        "rclpy.executors": types.SimpleNamespace(SingleThreadedExecutor=FakeExecutor),
        "rclpy.qos": qos,
    }.items():
        monkeypatch.setitem(sys.modules, name, content)
    monkeypatch.setattr(native, "native_type", lambda kind: types.SimpleNamespace if kind is not String else Text)
    return nodes


class Text:
    """std_msgs/msg/String as a class of rclpy."""

    data = ""


def test_messages_arrive_and_qualities_of_service_are_requested(node: list[FakeNode]) -> None:
    before = threading.active_count()
    with open_transport("rclpy", domain=5, node="bridge") as transport:
        publisher = transport.advertise("/status", String, SENSOR)
        subscription = transport.subscribe("/status", String, SENSOR)
        transport.subscribe("/stop", String, LATCHED)
        (fake,) = node
        assert fake.name == "bridge" and publisher.matched == subscription.publishers == 1
        profiles = [each.profile for each in (*fake.publishers, *fake.subscriptions)]
        assert {each["history"] for each in profiles} == {"KEEP_LAST"}
        assert [each["depth"] for each in profiles] == [1, 1, LATCHED.depth]
        assert [(each["reliability"], each["durability"]) for each in profiles] == [
            ("RELIABLE", "VOLATILE"),
            ("BEST_EFFORT", "VOLATILE"),
            ("RELIABLE", "TRANSIENT_LOCAL"),
        ]
        assert subscription.latest() is None
        publisher.publish(String("up"))
        received = until(subscription.latest)
        assert (received.message, received.publisher) == (String("up"), "00" * 16)
        other = fake.create_publisher(Text, "/status", None)
        assert subscription.publishers == 2
        other.publish(types.SimpleNamespace())
        until(lambda: subscription.latest() is received and subscription.malformed == 1)
    assert fake.destroyed and not fake.subscriptions and len(fake.publishers) == 1
    assert threading.active_count() == before


def test_auto_selects_rclpy_if_ros_is_set_up(node: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROS_DISTRO", "jazzy")
    with open_transport("auto") as transport:
        transport.advertise("/status", String, COMMAND)
        assert node[0].publishers
    monkeypatch.delenv("ROS_DISTRO")
    with pytest.raises(TransportError, match="ROS 2 is not set up here"):
        open_transport("auto")


def test_a_missing_ros_installation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rclpy", None)
    with pytest.raises(TransportError, match="source its setup"):
        open_transport("rclpy")


def test_a_missing_message_package_is_named(node: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(Exception, match="install its package 'sensor_msgs'"):
        native.native_type(JointState)
