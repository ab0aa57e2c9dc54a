"""Tests of the simulated robot behind topics: resets, commands, status, faults and lockstep."""

import time

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy_robots.commands import targets_of
from robopolicy_robots.messages import (
    Float64MultiArray,
    Header,
    Image,
    JointState,
    JointTrajectory,
    JointTrajectoryPoint,
    PoseStamped,
    String,
)
from robopolicy_robots.simulated.node import SimNode
from robopolicy_robots.simulated.robot import SimulatedRobot
from robopolicy_robots.simulated.topics import EPISODE, FAULT, RESET, Reset, Status
from robopolicy_robots.transports.base import COMMAND, LATCHED, SENSOR
from robopolicy_robots.transports.loopback import LoopbackTransport
from robopolicy_tasks.manipulation.lift import Lift

TOPICS = {"joints": "/joint_states", "object.cube": "/objects/cube/pose"}


class Bench:
    """A node and the other ends of its topics."""

    def __init__(self, domain: int, lockstep: bool = False, **settings) -> None:
        self.transport = LoopbackTransport(domain)
        node = LoopbackTransport(domain)
        robot = SimulatedRobot(Lift(), period=0.05 if lockstep else 0.01)
        self.node = SimNode(robot, node, TOPICS, "/arm/joint_trajectory", lockstep=lockstep, **settings)
        self.joints = self.transport.subscribe("/joint_states", JointState, SENSOR)
        self.cube = self.transport.subscribe("/objects/cube/pose", PoseStamped, SENSOR)
        self._status = self.transport.subscribe(EPISODE, String, LATCHED)
        self._commands = self.transport.advertise("/arm/joint_trajectory", JointTrajectory, COMMAND)
        self._reset = self.transport.advertise(RESET, String, COMMAND)
        self._fault = self.transport.advertise(FAULT, String, COMMAND)

    @property
    def status(self) -> Status:
        return Status.read(self._status.latest().message)

    def command(self, **targets: float) -> None:
        point = JointTrajectoryPoint(np.array(list(targets.values())))
        self._commands.publish(JointTrajectory(Header(), tuple(targets), (point,)))

    def reset(self, seed: int, request: int) -> None:
        self._reset.publish(Reset(seed, request).message())

    def fail(self, text: str) -> None:
        self._fault.publish(String(text))


def test_a_reset_starts_the_episode_of_the_seed_once():
    bench = Bench(801)
    bench.reset(7, 1)
    bench.node.tick()
    exact = SimulatedRobot(Lift(), period=0.01)
    exact.reset(7)
    exact.advance()
    wanted = exact.messages(bench.cube.latest().message.header.stamp)
    assert bench.cube.latest().message.pose == wanted["object.cube"].pose
    np.testing.assert_array_equal(bench.joints.latest().message.position, wanted["joints"].position)
    assert (bench.status.seed, bench.status.request, bench.status.steps) == (7, 1, 0)
    bench.command(joint1=0.1)
    for _ in range(10):
        bench.node.tick()
    assert bench.status.steps == 2
    bench.reset(7, 1)  # the same request again
    bench.node.tick()
    assert bench.status.steps == 2
    bench.reset(7, 2)
    bench.node.tick()
    assert (bench.status.steps, bench.status.request) == (0, 2)


def test_invalid_resets_are_counted_and_ignored():
    bench = Bench(807)
    for text in ("", "[]", '{"seed": "1"}', '{"seed": -1, "request": 3}', '{"sead": 1}', '{"seed": 1.5}'):
        bench._reset.publish(String(text))
        bench.node.tick()
    assert bench.status.refused == 6 and bench.status.request == -1


def test_a_command_of_the_previous_episode_is_ignored():
    bench = Bench(802)
    bench.node.tick()
    bench.command(joint1=1.0)
    bench.reset(3, 1)
    for _ in range(5):
        bench.node.tick()
    assert bench.status.steps == 0 and bench.node.robot.episode.steps == 0


def test_invalid_commands_are_counted_and_ignored():
    bench = Bench(803)
    for targets in ({"elbow": 0.0}, {"joint1": np.nan}, {}):
        bench.command(**targets)
        bench.node.tick()
    assert bench.status.refused == 3 and bench.node.robot.episode.steps == 0
    assert targets_of(Float64MultiArray(data=np.array([1.0, 2.0])), ("a", "b"))[0] == ("a", "b")
    with pytest.raises(UserError):
        targets_of(Float64MultiArray(data=np.array([1.0])), ("a", "b"))


def test_in_lockstep_time_advances_with_commands_only():
    bench = Bench(804, lockstep=True)
    stamps = []
    for step in range(6):
        bench.node.tick()
        assert not bench.node.tick()
        stamps.append(bench.joints.latest().stamp)
        assert bench.cube.latest().stamp == stamps[-1]
        bench.command(joint1=0.01 * step)
    np.testing.assert_allclose(np.diff(stamps), 0.05, atol=1e-6)
    assert stamps[0] == pytest.approx(1.0)


def test_faults_last_for_their_duration():
    bench = Bench(805)
    bench.node.tick()
    bench.fail("nan 0.05")
    bench.node.tick()
    assert np.isnan(bench.joints.latest().message.position).all()
    bench.fail("mute 0.05")
    bench.node.tick()
    before = bench.joints.latest().sequence
    bench.node.tick()
    assert bench.joints.latest().sequence == before
    time.sleep(0.06)
    bench.node.tick()
    assert bench.joints.latest().sequence == before + 1
    assert np.isfinite(bench.joints.latest().message.position).all()
    bench.fail("freeze 0.05")
    start = time.monotonic()
    bench.node.tick()
    assert time.monotonic() - start >= 0.05
    bench.fail("freeze for long")  # ignored
    bench.node.tick()


def test_cameras_are_rendered_at_their_own_rate():
    bench = Bench(806, cameras={"front": "/front/image_raw"}, image_size=32, camera_period=0.05)
    images = bench.transport.subscribe("/front/image_raw", Image, SENSOR)
    for _ in range(11):
        bench.node.tick()
        images.latest()
    assert images.latest().sequence == 3
    assert images.latest().message.pixels.shape == (32, 32, 3) and images.latest().message.pixels.std() > 5
