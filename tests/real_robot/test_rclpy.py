"""Tests of the rclpy transport against a stand-in: its calls to ROS, and threads that end."""

import sys
import threading
import time
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from networks import until

from robopolicy_robots.codecs import native
from robopolicy_robots.messages import Duration, JointState, JointTrajectory, JointTrajectoryPoint, String
from robopolicy_robots.transports.base import COMMAND, LATCHED, SENSOR, TransportError, open_transport
from robopolicy_robots.transports.wrapped import WrappedTransport

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


class FakeFuture:
    """A future of rclpy that is done at once or later."""

    def __init__(self) -> None:
        self._result: Any = None
        self._callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def result(self) -> Any:
        return self._result

    def set_result(self, result: Any) -> None:
        self._result = result
        for callback in self._callbacks:
            callback(self)


class FakeActionClient:
    """A client of an action; the test answers its goals."""

    made: ClassVar[list["FakeActionClient"]] = []

    def __init__(self, node: FakeNode, kind: Any, action: str) -> None:
        self.node, self.kind, self.action = node, kind, action
        self.goals: list[types.SimpleNamespace] = []  # message, response, result and feedback of every goal
        self.ready, self.destroyed = True, False
        FakeActionClient.made.append(self)

    def server_is_ready(self) -> bool:
        return self.ready

    def send_goal_async(self, message: Any, feedback_callback: Any) -> FakeFuture:
        goal = types.SimpleNamespace(message=message, response=FakeFuture(), result=FakeFuture(), canceled=0)
        goal.feedback = feedback_callback
        self.goals.append(goal)
        return goal.response

    def answer(self, number: int, accepted: bool = True) -> None:
        goal = self.goals[number]

        def cancel() -> FakeFuture:
            goal.canceled += 1
            return FakeFuture()

        handle = types.SimpleNamespace(
            accepted=accepted, get_result_async=lambda: goal.result, cancel_goal_async=cancel
        )
        goal.response.set_result(handle)

    def finish(self, number: int, status: Any, code: Any, text: str = "") -> None:
        result = types.SimpleNamespace(error_code=code, error_string=text)
        self.goals[number].result.set_result(types.SimpleNamespace(status=status, result=result))

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True


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
        "rclpy.action": types.SimpleNamespace(ActionClient=FakeActionClient),
        "control_msgs.action": types.SimpleNamespace(
            FollowJointTrajectory=types.SimpleNamespace(Goal=types.SimpleNamespace)
        ),
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


def test_goals_are_sent_replaced_and_canceled_with_rclpy(node: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robopolicy_robots.transports.actions.CANCEL_PERIOD", 0.0)
    trajectory = JointTrajectory(
        joint_names=("a",), points=(JointTrajectoryPoint(positions=np.ones(1), time_from_start=Duration(0, 20)),)
    )
    with WrappedTransport(open_transport("rclpy")) as transport:
        client = transport.trajectory_client("/arm/follow_joint_trajectory")
        fake = FakeActionClient.made[-1]
        assert (fake.node, fake.action) == (node[-1], "/arm/follow_joint_trajectory") and client.matched == 1
        fake.ready = False
        assert client.matched == 0
        client.send(trajectory)
        sent = fake.goals[0].message.trajectory
        assert sent.joint_names == ["a"] and list(sent.points[0].positions) == [1.0]
        client.cancel()
        assert not fake.goals[0].canceled, "it is not accepted yet"
        fake.answer(0)
        client.cancel()
        assert fake.goals[0].canceled == 1
        fake.finish(0, 5, 0)
        client.send(trajectory)
        client.send(trajectory)
        fake.answer(1)
        fake.answer(2)
        fake.goals[2].feedback(None)
        fake.finish(1, 5, -1, "Current goal cancelled due to new incoming action.")
        assert not client.failure, "the result of the replaced goal does not count"
        fake.finish(2, 6, -5, "joint a")
        assert client.failure == "aborted: goal tolerance violated: joint a"
        client.send(trajectory)
        assert not client.failure
        fake.answer(3, accepted=False)
        assert client.failure == "rejected"
        client.send(trajectory)
        fake.answer(4)
        fake.finish(4, "done", None)
        assert client.failure.startswith("malformed result")
        client.send(trajectory)
        fake.answer(5)
        fake.finish(5, 4, 0)
        client.cancel()
        assert not client.failure and not fake.goals[5].canceled
    assert fake.destroyed


def test_a_missing_action_package_is_named(node: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "control_msgs.action")
    with open_transport("rclpy") as transport, pytest.raises(Exception, match="install its package 'control_msgs'"):
        transport.trajectory_client("/arm/follow_joint_trajectory")


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
