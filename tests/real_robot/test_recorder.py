"""Tests of recordings: they hold sent and received messages, and other tools read them."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trajectory_controller import ACTION, DirectClient, TrajectoryController

from robopolicy.deploy.safety.filter import FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import JointLimits
from robopolicy.errors import UserError
from robopolicy_robots.filter_log import TOPIC, RecordedFilter, refilter
from robopolicy_robots.messages import (
    Duration,
    Float64MultiArray,
    Header,
    Image,
    JointState,
    JointTrajectory,
    JointTrajectoryPoint,
    PoseStamped,
    String,
    Time,
)
from robopolicy_robots.recorder import Recorded, RecordedTransport, Recorder, read
from robopolicy_robots.transports.base import COMMAND, SENSOR
from robopolicy_robots.transports.loopback import LoopbackTransport

pytest.importorskip("mcap", reason="needs robopolicy[record]")
pytest.importorskip("rosbags", reason="needs robopolicy[ros]")


def joint_state(i: int) -> JointState:
    return JointState(Header(Time(i, 5), "base"), ("a", "b"), np.array([0.1 * i, -i]), np.array([i, 0.0]))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "run.mcap"
    with Recorder(path) as recorder:
        for i in range(20):
            recorder.write("/joint_states", joint_state(i))
        recorder.write("/objects/cube/pose", PoseStamped())
        recorder.write("/robopolicy/status", String('{"state": "RUN"}'))
        pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
        recorder.write("/front/image_raw", Image.from_pixels(pixels, Header()))
        point = JointTrajectoryPoint(np.array([0.1, 0.2]))
        recorder.write("/arm/joint_trajectory", JointTrajectory(Header(), ("a", "b"), (point,)))
    return path


def test_written_messages_are_read_back(recording):
    found = list(read(recording))
    assert len(found) == 24
    states = [each.message for each in found if each.topic == "/joint_states"]
    assert states == [joint_state(i) for i in range(20)]
    assert found[-1].message.points[0].positions.tolist() == [0.1, 0.2]
    assert all(0 <= later.time - earlier.time < 5 for earlier, later in itertools.pairwise(found))


def test_mcap_ros2_support_reads_a_recording(recording):
    reader = pytest.importorskip("mcap_ros2.reader", reason="needs robopolicy[dev]")
    found = [each for each in reader.read_ros2_messages(str(recording)) if each.channel.topic == "/joint_states"]
    assert [each.ros_msg.header.stamp.sec for each in found] == list(range(20))
    assert list(found[7].ros_msg.position) == [0.1 * 7, -7.0] and list(found[7].ros_msg.name) == ["a", "b"]


def test_rosbags_reads_a_recording(recording):
    from rosbags.rosbag2 import Reader
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    with Reader(recording) as reader:
        found = [(c.topic, store.deserialize_cdr(data, c.msgtype)) for c, _, data in reader.messages()]
    assert len(found) == 24
    image = next(message for topic, message in found if topic == "/front/image_raw")
    assert (image.height, image.width, image.encoding) == (4, 6, "rgb8") and image.data[5] == 5


def test_a_recorded_transport_records_sent_messages_and_each_received_message_once(tmp_path):
    robot, path = LoopbackTransport(771), tmp_path / "run.mcap"
    with Recorder(path) as recorder, RecordedTransport(LoopbackTransport(771), recorder) as transport:
        publisher = robot.advertise("/joint_states", JointState, SENSOR)
        commands = robot.subscribe("/commands", Float64MultiArray, COMMAND)
        states = transport.subscribe("/joint_states", JointState, SENSOR)
        command = transport.advertise("/commands", Float64MultiArray, COMMAND)
        assert states.latest() is None and states.publishers == 1 and command.matched == 1
        for i in range(3):
            publisher.publish(joint_state(i))
            for _ in range(2):
                assert states.latest().message == joint_state(i)
            command.publish(Float64MultiArray(data=np.array([i])))
        assert commands.latest().message.data.tolist() == [2.0]
        assert len(transport.graph().endpoints) == 2
    robot.close()
    assert [each.topic for each in read(path)] == ["/joint_states", "/commands"] * 3


def test_goals_of_a_trajectory_controller_are_recorded(tmp_path, monkeypatch):
    client = DirectClient(TrajectoryController("a"))
    monkeypatch.setattr(LoopbackTransport, "_trajectory_client", lambda *_: client)
    path = tmp_path / "run.mcap"
    points = (JointTrajectoryPoint(positions=np.ones(1), time_from_start=Duration(1, 0)),)
    with Recorder(path) as recorder, RecordedTransport(LoopbackTransport(772), recorder) as transport:
        recorded = transport.trajectory_client(ACTION)
        recorded.send(JointTrajectory(joint_names=("a",), points=points))
        assert recorded.matched == 1 and not recorded.failure
        recorded.cancel()
        recorded.send(JointTrajectory())
        assert recorded.failure == "rejected"
    assert [each.topic for each in read(path)] == [f"{ACTION}/goal"] * 2
    assert [len(each.message.points) for each in read(path)] == [1, 0]


def test_an_invalid_file_is_refused(tmp_path):
    (tmp_path / "x.mcap").write_bytes(b"not one")
    with pytest.raises(UserError, match="cannot be read"):
        list(read(tmp_path / "x.mcap"))
    with pytest.raises(UserError, match="Cannot write"):
        Recorder(tmp_path / "x.mcap" / "y.mcap")


def test_messages_faster_than_the_disk_are_dropped_and_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("robopolicy_robots.recorder.QUEUE_SIZE", 5)
    recorder, disk = Recorder(tmp_path / "x.mcap"), threading.Event()
    channel = recorder._channel
    monkeypatch.setattr(recorder, "_channel", lambda *key: disk.wait() and channel(*key))
    for i in range(50):
        recorder.write("/joint_states", joint_state(i))
    assert 44 <= recorder.dropped <= 45
    disk.set()
    recorder.close()
    assert len(list(read(tmp_path / "x.mcap"))) == 50 - recorder.dropped
    recorder.close()  # a second close reports nothing
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'x.mcap'} lacks {recorder.dropped} messages, which arrived faster than the disk writes"
    ]


def test_a_full_disk_is_reported_on_close(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "x.mcap")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "_channel", full)
    recorder.write("/joint_states", joint_state(0))
    with pytest.raises(UserError, match="No space left"):
        recorder.close()


LIMITS = JointLimits(
    names=("a", "b"),
    position_low=np.array([-1.0, 0.0]),
    position_high=np.array([1.0, 0.04]),
    velocity=np.array([2.0, 0.2]),
    acceleration=np.array([10.0, np.inf]),
    jerk=np.full(2, np.inf),
    effort=np.full(2, np.inf),
)


def test_refiltering_a_recorded_run_gives_the_same_commands(tmp_path):
    path, rng, dt = tmp_path / "run.mcap", np.random.default_rng(0), 0.02
    with Recorder(path) as recorder:
        safety = RecordedFilter(LIMITS, recorder=recorder)
        state = FilterState.at_rest(np.array([0.1, 0.02]))
        for tick in range(200):
            measured = JointMeasurement(tick * dt, state.motion.position, np.full(2, np.nan), np.full(2, np.nan))
            if tick % 50 == 49:
                _, state = safety.hold(state, dt)
            else:
                target = np.array([np.nan, 0.0]) if tick == 30 else state.target + rng.normal(0, [0.05, 0.003])
                _, state, _ = safety.step(target, state, measured, dt)
    recording = list(read(path))
    assert refilter(recording, SafetyFilter(LIMITS)) == (200, [])
    slower = replace(LIMITS, velocity=np.array([0.5, 0.2]))
    ticks, other = refilter(recording, SafetyFilter(slower))
    assert ticks == 200 and len(other) > 20  # the comparison is not vacuous


def test_a_damaged_record_is_refused():
    damaged = Recorded(TOPIC, String('{"state": 1}'), 0.0)
    with pytest.raises(UserError, match="record of tick 0"):
        refilter([damaged], SafetyFilter(LIMITS))
