"""Tests of the codecs against rosbags: the same bytes, hashes and definitions; invalid data raises CodecError."""

import json as text
import tracemalloc
import types
from array import array
from functools import cache
from typing import Any

import numpy as np
import pytest
from random_messages import random_message

from robopolicy.errors import UserError
from robopolicy_robots.codecs import CodecError, cdr, json, message_type, native, register, ros1
from robopolicy_robots.codecs.definitions import describe, prepare, type_hash
from robopolicy_robots.message import CATALOGUE, Message
from robopolicy_robots.messages import (
    CameraInfo,
    DiagnosticStatus,
    Header,
    Image,
    JointState,
    JointTrajectory,
    JointTrajectoryPoint,
    String,
    Time,
)

typesys = pytest.importorskip("rosbags.typesys", reason="needs robopolicy[ros]")
SHIPPED = sorted((kind for name, kind in CATALOGUE.items() if kind.__module__ == "robopolicy_robots.messages"), key=str)
STORES = [store for store in typesys.Stores if store.name.startswith("ROS2")]


def as_rosbags(message: Message, store: Any) -> Any:
    """Convert a message to the classes of a rosbags typestore."""
    values = []
    for each in describe(type(message)):
        value = getattr(message, each.name)
        if isinstance(each.base, type):
            value = [as_rosbags(item, store) for item in value] if each.many else as_rosbags(value, store)
        values.append(list(value) if isinstance(value, tuple) else value)
    if message.ros_name == "std_msgs/msg/Header" and "seq" in str(store.fielddefs[message.ros_name]):
        values.insert(0, 0)
    return store.types[message.ros_name](*values)


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_bytes_match_rosbags(kind: type[Message]) -> None:
    ros2 = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    noetic = typesys.get_typestore(typesys.Stores.ROS1_NOETIC)
    generator = np.random.default_rng(0)
    for count in range(20):
        message = kind() if count == 0 else random_message(kind, generator)
        data = cdr.encode(message)
        assert data == bytes(ros2.serialize_cdr(as_rosbags(message, ros2), kind.ros_name))
        assert cdr.decode(kind, data) == message
        big = bytes(ros2.serialize_cdr(as_rosbags(message, ros2), kind.ros_name, little_endian=False))
        assert cdr.decode(kind, big) == message
        packed = ros1.encode(message)
        assert packed == bytes(noetic.serialize_ros1(as_rosbags(message, noetic), kind.ros_name))
        assert ros1.decode(kind, packed) == message


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_definitions_are_the_same_in_every_release(kind: type[Message]) -> None:
    fields = prepare(kind).fielddefs[kind.ros_name][1]
    for store in STORES:
        assert typesys.get_typestore(store).fielddefs[kind.ros_name][1] == fields, store
    for store in (typesys.Stores.ROS2_IRON, typesys.Stores.ROS2_LYRICAL):
        assert typesys.get_typestore(store).hash_rihs01(kind.ros_name) == type_hash(kind)
    text, checksum = ros1.definition(kind)
    assert len(checksum) == 32 and isinstance(text, str)


def test_char_is_hashed_as_uint8_as_in_ros() -> None:
    kind = register("test_msgs/msg/Letters", "char one\nchar[4] four\nchar[] many\n")
    same = register("test_msgs/msg/Numbers", "uint8 one\nuint8[4] four\nuint8[] many\n")
    assert [(each.base, each.size) for each in describe(kind)] == [(each.base, each.size) for each in describe(same)]
    info = message_type("rmw_dds_common/msg/ParticipantEntitiesInfo")  # of a real system; its ids are chars
    assert type_hash(info) == "RIHS01_91a0593bacdcc50ea9bdcf849a938b128412cc1ea821245c663bcd26f83c295e"


FROZEN = {
    "std_msgs/msg/String": "RIHS01_df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18",
    "sensor_msgs/msg/JointState": "RIHS01_a13ee3a330e346c9d87b5aa18d24e11690752bd33a0350f11c5882bc9179260e",
}


@pytest.mark.parametrize("name", FROZEN)
def test_hashes_match_ros(name: str) -> None:
    assert type_hash(CATALOGUE[name]) == FROZEN[name]


def test_checksums_match_ros1() -> None:
    assert ros1.definition(JointState)[1] == "3066dcd76a6cfaef579bd0f34173e9fd"
    assert ros1.definition(String)[1] == "992ce8a1687cec8c8bd883ec73ca41d1"


def test_bytes_match_hand_written_bytes() -> None:
    assert cdr.encode(String("hé")).hex() == "00010000" + "04000000" + "68c3a900"
    state = JointState(Header(Time(1, 2), "b"), ("j",), np.array([1.0]))
    head = "00010000" + "01000000" + "02000000" + "02000000" + "6200" + "0000"
    name = "01000000" + "02000000" + "6a00" + "0000"
    position = "01000000" + "000000000000f03f"  # at 36 bytes: aligned to 8
    assert cdr.encode(state).hex() == head + name + position + "00000000" * 2
    assert ros1.encode(String("hé")).hex() == "03000000" + "68c3a9"


@pytest.mark.parametrize("kind", [JointState, JointTrajectory, Image, DiagnosticStatus, CameraInfo])
def test_invalid_bytes_raise_a_codec_error(kind: type[Message]) -> None:
    generator = np.random.default_rng(1)
    for _ in range(60):
        message = random_message(kind, generator)
        for codec, start in ((cdr, 4), (ros1, 0)):
            data = codec.encode(message)
            noise = generator.bytes(int(generator.integers(0, 80)))
            flipped = bytearray(data)
            flipped[generator.integers(len(data))] ^= 1 << generator.integers(8)
            for broken in (
                data[: len(data) // 2],
                data[:start] + noise,
                noise,
                data + noise + b"12345",
                bytes(flipped),
            ):
                try:
                    assert isinstance(codec.decode(kind, broken), kind)
                except CodecError as error:
                    assert "\n" not in str(error) and kind.ros_name in str(error)


def test_noise_and_false_lengths_allocate_little_memory() -> None:
    """For every type, the allocated memory is proportional to the received bytes."""
    generator = np.random.default_rng(2)
    for kind in SHIPPED:
        prepare(kind)
    tracemalloc.start()
    try:
        for kind in SHIPPED:
            for codec, start in ((cdr, 4), (ros1, 0)):
                codec.decode(kind, whole := codec.encode(random_message(kind, generator)))
                for place in range(start, min(len(whole) - 3, 32), 4):
                    claim = int(generator.choice([2**31 - 1, 2**32 - 1, 10**9])).to_bytes(4, "little")
                    for data in (whole[:place] + claim + whole[place + 4 :], whole[:start] + generator.bytes(place)):
                        tracemalloc.reset_peak()
                        before = tracemalloc.get_traced_memory()[0]
                        try:
                            assert isinstance(codec.decode(kind, data), kind)
                        except CodecError as error:
                            assert "\n" not in str(error)
                        assert tracemalloc.get_traced_memory()[1] - before < 2**17 + 50 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [2**31, 2**32 - 1, 10**6])
def test_false_sizes_are_refused(claimed: int) -> None:
    data = cdr.encode(Time())[:4] + bytes(8) + (1).to_bytes(4, "little") + bytes(4) + claimed.to_bytes(4, "little")
    with pytest.raises(CodecError, match="No trajectory_msgs/msg/JointTrajectory"):
        cdr.decode(JointTrajectory, data + bytes(40))


@pytest.mark.parametrize(
    "message",
    [Time(2**40, 0), Time("1", 0), String(3), JointTrajectory(points=(Time(),)), JointState(name=(1,))],  # type: ignore
)
def test_values_that_do_not_fit_the_type_are_refused(message: Message) -> None:
    with pytest.raises(CodecError):
        cdr.encode(message)


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("spelled_as_ros1", [False, True])
def test_json_round_trip(kind: type[Message], spelled_as_ros1: bool) -> None:
    generator = np.random.default_rng(2)
    for _ in range(10):
        message = random_message(kind, generator, finite=True)
        data = text.loads(text.dumps(json.encode(message, spelled_as_ros1), allow_nan=False))
        assert json.decode(kind, data) == message


def test_json_matches_the_rosbridge_spelling() -> None:
    state = JointState(Header(Time(1, 2), "base"), ("a",), np.array([np.nan]), np.array([np.inf, 2.0]))
    header = {"stamp": {"sec": 1, "nanosec": 2}, "frame_id": "base"}
    lists = {"name": ["a"], "position": [None], "velocity": [None, 2.0], "effort": []}
    assert json.encode(state) == {"header": header, **lists}
    assert json.encode(state, ros1=True)["header"]["stamp"] == {"secs": 1, "nsecs": 2}
    assert json.encode(CameraInfo(), ros1=True)["K"] == [0.0] * 9
    old = {"header": {"seq": 7, "stamp": {"secs": 1, "nsecs": 2}, "frame_id": "base"}, **lists}
    expected = JointState(state.header, ("a",), np.array([np.nan]), np.array([np.nan, 2.0]))
    assert json.decode(JointState, old) == expected
    image = Image(data=np.array([0, 255, 1], np.uint8))
    assert json.encode(image)["data"] == "AP8B"
    assert json.decode(Image, {**json.encode(image), "data": [0, 255, 1]}) == image


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": None}, "expected 'name' of string, found None"),
        ({"name": [1]}, "expected 'name' of string, found 1"),
        ({"position": [True]}, "expected 'position' of float64, found True"),
        ({"position": "AAAA"}, "expected 'position' of float64"),
        ({"header": {"stamp": {"sec": 1.5, "nanosec": 0}, "frame_id": ""}}, "expected 'sec' of int32, found 1.5"),
        ({"header": {"stamp": {"sec": 10**400, "nanosec": 0}, "frame_id": ""}}, "expected 'sec' of int32"),
        ({"header": {"stamp": {"sec": 0, "nanosec": -1}, "frame_id": ""}}, "expected 'nanosec' of uint32, found -1"),
        ({"position": [10**400]}, "int too large"),
        ({"header": {"frame_id": ""}}, "'stamp' is missing"),
        ({"header": []}, "expected an object, found list"),
    ],
)
def test_invalid_json_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        json.decode(JointState, {**json.encode(JointState()), **change})
    for data in (None, [], "x", {}, {**json.encode(Image()), "data": "?"}):
        with pytest.raises(CodecError, match="No sensor_msgs/msg/Image"):
            json.decode(Image, data)


DEFAULTS = {"string": "", "bool": False, "byte": b"\0", "float32": 0.0, "float64": 0.0}


@cache
def native_class(kind: type[Message]) -> type:
    """Return a class as ROS 2 generates it: fixed arrays in numpy, sequences in array.array, byte as bytes."""

    def make(self: Any) -> None:
        for each in describe(kind):
            if each.dtype is not None:
                code = np.dtype(each.dtype).char
                setattr(self, each.name, np.zeros(each.size, each.dtype) if each.size else array(code))
            elif each.many:
                setattr(self, each.name, [])
            elif isinstance(each.base, type):
                setattr(self, each.name, native_class(each.base)())
            else:
                setattr(self, each.name, DEFAULTS.get(each.base, 0))

    def check(self: Any, name: str, value: Any) -> None:
        if name in vars(self):
            assert type(value) is type(vars(self)[name]), (name, value)
        object.__setattr__(self, name, value)

    return type(kind.__name__, (), {"__init__": make, "__setattr__": check})


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_native_objects_round_trip(kind: type[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "native_type", native_class)
    message = random_message(kind, np.random.default_rng(3))
    assert native.decode(kind, native.encode(message)) == message
    with pytest.raises(CodecError, match=f"No {kind.ros_name}"):
        native.decode(kind, types.SimpleNamespace())


def test_native_types_are_imported_when_needed() -> None:
    with pytest.raises(UserError, match="install its package 'trajectory_msgs'"):
        native.native_type(JointTrajectoryPoint)


def test_types_of_other_packages_are_found() -> None:
    battery = message_type("sensor_msgs/msg/BatteryState")
    message = random_message(battery, np.random.default_rng(4), finite=True)
    assert cdr.decode(battery, cdr.encode(message)) == message == json.decode(battery, json.encode(message))
    assert message_type("sensor_msgs/msg/JointState") is JointState
    with pytest.raises(UserError, match="Unknown message type 'my_msgs/msg/Nothing'"):
        message_type("my_msgs/msg/Nothing")


def test_types_are_registered_from_text() -> None:
    text = "std_msgs/Header header\nfloat32[2] force\nstring[] from\ngeometry_msgs/Transform[] frames\nint8 MAX=4\n"
    probe = register("my_msgs/msg/Probe", text)
    assert register("my_msgs/msg/Probe", text) is probe is message_type("my_msgs/msg/Probe")
    message = random_message(probe, np.random.default_rng(5), finite=True)
    assert cdr.decode(probe, cdr.encode(message)) == message == json.decode(probe, json.encode(message))
    assert type_hash(probe).startswith("RIHS01_")
    for name, broken in (
        ("my_msgs/msg/Probe", "int8 x"),
        ("my_msgs/msg/Broken", "no definition"),
        ("my_msgs/msg/Far", "other_msgs/Unknown x"),
        ("Probe", "int8 x"),
    ):
        with pytest.raises(UserError) as error:
            register(name, broken)
        assert "\n" not in str(error.value)
