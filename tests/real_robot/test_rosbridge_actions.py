"""Tests of trajectory goals over rosbridge, against a simulated server with a simulated trajectory controller."""

import argparse
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from networks import until
from rig import Embodiment, robot_spec

from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec
from robopolicy_robots.commands import trajectory_of
from robopolicy_robots.connection import connect
from robopolicy_robots.loop import ControlLoop
from robopolicy_robots.messages import Header, JointState, Time
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.robot import RobotSpec, Topic, load_robot
from robopolicy_robots.states import State
from robopolicy_robots.transports.actions import FOLLOW_JOINT_TRAJECTORY
from robopolicy_robots.transports.base import SENSOR, TransportError, open_transport

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
pytest.importorskip("websockets", reason="needs robopolicy[ros]")
from rosbridge_hub import Hub
from trajectory_controller import ACTION, TrajectoryController

from robopolicy_robots.transports.rosbridge import RosbridgeTransport

ROBOT = robot_spec(command=Topic(ACTION, FOLLOW_JOINT_TRAJECTORY), cameras=())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the polling and retry periods."""
    for name in ("PEER_POLL_PERIOD", "RETRY"):
        monkeypatch.setattr(f"robopolicy_robots.transports.rosbridge.{name}", 0.05)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Yield a server with a controller."""
    hub = Hub(controller=TrajectoryController("abc"))
    yield hub
    hub.stop()


def goal(*targets: float) -> object:
    return trajectory_of(ROBOT, [np.full(3, target) for target in targets])


def test_goals_follow_the_protocol_of_rosbridge(hub: Hub) -> None:
    controller = hub.controller
    assert controller is not None
    with RosbridgeTransport(hub.url) as transport:
        client = transport.trajectory_client(ACTION)
        until(lambda: client.servers == (ACTION,))
        assert client.matched == 1 and not client.failure
        client.send(goal(0.1, 0.2))
        until(lambda: controller.goals)
        request = next(each for each in hub.requests if each["op"] == "send_action_goal")
        assert request["action"] == ACTION and request["action_type"] == FOLLOW_JOINT_TRAJECTORY
        assert request["feedback"] is True and request["args"]["trajectory"]["joint_names"] == ["a", "b", "c"]
        assert controller.goals == [goal(0.1, 0.2)]
        client.send(goal(0.3))
        until(lambda: len(controller.goals) == 2)
        assert not client.failure, "the result of the replaced goal does not count"
        client.cancel()
        until(lambda: controller.canceled)
        second = [each["id"] for each in hub.requests if each["op"] == "send_action_goal"][1]
        assert controller.canceled[-1] == second and not client.failure
        until(lambda: not client._running)
        controller.rejects = True
        client.send(goal(0.4))
        assert until(lambda: client.failure) == "Action goal was rejected"
        controller.rejects = False
        client.send(goal(0.5, 0.6, 0.7))
        until(lambda: len(controller.goals) == 3)
        controller.abort(-4, "a")
        assert until(lambda: client.failure) == "aborted: path tolerance violated: a"
        client.send(goal(0.5))
        until(lambda: len(controller.goals) == 4)
        time.sleep(0.05)
        controller.update()
        until(lambda: not client._running)
        assert not client.failure, "the goal has succeeded"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"status": 4, "values": None},
        {"status": 4, "values": {"error_code": "0"}, "result": True},
        {"status": "4", "values": {"error_code": 0}},
        {"status": True, "values": {"error_code": 0}},
        {"status": 2, "values": {"error_code": 0}},
        {"status": [4], "values": {"error_code": {}}},
        {"status": 4, "values": {"error_code": 0.0}},
    ],
)
def test_a_malformed_result_is_a_failure(hub: Hub, fields: dict[str, object]) -> None:
    hub.controller = None  # answers nothing
    with RosbridgeTransport(hub.url) as transport:
        client = transport.trajectory_client(ACTION)
        client.send(goal(0.1))
        until(lambda: "send_action_goal" in [each["op"] for each in hub.requests])
        for other in ({}, {"id": "other", "status": 6}, {"id": None, "result": False}):
            hub.send_raw(json.dumps({"op": "action_result", **other}))
        sent = next(each["id"] for each in hub.requests if each["op"] == "send_action_goal")
        hub.send_raw(json.dumps({"op": "action_feedback", "id": sent, "values": 3}))
        assert not client.failure
        hub.send_raw(json.dumps({"op": "action_result", "id": sent, **fields}))
        assert until(lambda: client.failure).startswith("malformed result")


def test_a_server_without_an_answer_is_a_failure(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robopolicy_robots.transports.actions.ANSWER_TIMEOUT", 0.1)
    hub.controller = None
    with RosbridgeTransport(hub.url) as transport:
        client = transport.trajectory_client(ACTION)
        until(lambda: client.matched == 0)
        for _ in range(3):  # newer goals do not extend the time
            client.send(goal(0.1))
            time.sleep(0.06)
        assert client.failure == "no answer within 0.1 s"
        client.cancel()
        assert not client.failure


def test_goals_of_a_lost_connection_are_canceled_after_the_reconnection(hub: Hub) -> None:
    with RosbridgeTransport(hub.url) as transport:
        client = transport.trajectory_client(ACTION)
        assert hub.controller is not None
        client.send(goal(*np.linspace(0.0, 1.0, 100)))
        until(lambda: hub.controller.goals)
        hub.stop()
        assert until(lambda: client.failure) == "the connection to rosbridge was lost"
        until(lambda: not client.matched)
        client.send(goal(0.5))
        assert client.failure == "no connection to rosbridge"
        again = Hub(hub.port, controller=hub.controller)
        until(lambda: not hub.controller.busy)
        until(lambda: client.matched)
        assert len(hub.controller.goals) == 1, "the goal that was sent without a connection does not arrive"
        again.stop()


def test_closing_the_transport_sends_the_last_request_to_cancel(hub: Hub) -> None:
    assert hub.controller is not None
    transport = RosbridgeTransport(hub.url)
    client = transport.trajectory_client(ACTION)
    client.send(goal(*np.linspace(0.0, 1.0, 100)))
    until(lambda: hub.controller.goals)
    client.cancel()
    transport.close()
    until(lambda: hub.controller.canceled)


class Sweep:
    """A policy that moves all joints to 0.4 rad in steps of 0.01 rad."""

    spec = PolicySpec({"state": (3,)}, action_dim=3, horizon=20, action_horizon=10)
    takes_prefix = False

    def chunk(self, obs: dict[str, np.ndarray], prefix: object = None) -> np.ndarray:
        steps = 0.01 * np.arange(1, 21)
        return np.minimum(obs["state"][-1] + steps[:, None], 0.4)

    def close(self) -> None:
        pass


def test_a_policy_moves_a_robot_behind_rosbridge(hub: Hub) -> None:
    controller = hub.controller
    assert controller is not None
    stopping, path = threading.Event(), []

    def publish() -> None:
        with open_transport("rosbridge", url=hub.url) as side:
            publisher = side.advertise("/joint_states", JointState, SENSOR)
            while not stopping.wait(0.01):
                path.append(controller.update())
                publisher.publish(JointState(Header(Time.from_seconds(time.time())), ("a", "b", "c"), path[-1]))

    robot = threading.Thread(target=publish)
    robot.start()
    try:
        with RosbridgeTransport(hub.url) as transport:
            loop = ControlLoop(ROBOT, transport, Embodiment(), PolicyRunner(Sweep()))
            loop.arm()
            states = []
            loop.options.on_tick = lambda tick: states.append((tick.state, tick.reason))
            loop.run(2.5)
            assert loop.state is State.STOPPED and states[-1][0] is State.RUN, states[-1]
        until(lambda: not controller.busy)
    finally:
        stopping.set()
        robot.join()
    assert 2 <= len(controller.goals) <= 30
    positions = np.array(path)
    assert positions[-1] == pytest.approx(np.full(3, 0.4), abs=0.02)
    setback = np.maximum.accumulate(positions) - positions
    assert setback.max() < 0.01, "goals continue each other; one that arrives late steps back by less than one action"


YAML = """\
name: my_arm
joints: [{name: a, velocity: 1, low: -1, high: 1}]
state: {topic: /joint_states, type: sensor_msgs/msg/JointState}
command: {topic: /arm_controller/follow_joint_trajectory, type: control_msgs/action/FollowJointTrajectory}
transport: rosbridge
"""


def test_a_yaml_file_selects_the_action(tmp_path) -> None:
    path = tmp_path / "my_arm.yaml"
    path.write_text(YAML)
    assert load_robot(str(path)).uses_action
    for change, message in (
        ("mode: velocity", "needs mode: absolute"),
        ("simulated: true", "needs a topic"),
        ("sources: {x: {topic: /x, type: control_msgs/action/FollowJointTrajectory}}", "Unknown message type"),
    ):
        path.write_text(YAML + change + "\n")
        with pytest.raises(UserError, match=message):
            load_robot(str(path))


@pytest.mark.parametrize("name", ["dds", "zenoh", "lerobot", "ros1", "loopback"])
def test_transports_without_actions_are_refused(name: str) -> None:
    args = argparse.Namespace(transport=name, domain=None, connect=[])
    with pytest.raises(UserError, match=f"transport {name} has no actions.*choose the transport rclpy or rosbridge"):
        connect(args, RobotSpec("arm", ROBOT.joints, ROBOT.state, ROBOT.command))


def test_actions_of_ros_1_and_bare_transports_are_refused(hub: Hub) -> None:
    with RosbridgeTransport(hub.url, ros1=True) as transport, pytest.raises(TransportError, match="Actions of ROS 1"):
        transport.trajectory_client(ACTION)
    with open_transport("loopback") as transport, pytest.raises(TransportError, match="has no actions"):
        transport.trajectory_client(ACTION)
