"""One recording of a robot as rosbag 2 (SQLite, MCAP) and rosbag 1, written by rosbags."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

STATE, CAMERA, COMMAND, ACTIVE = "/joint_states", "/cam/compressed", "/commands", "/active"
TYPES = {
    STATE: "sensor_msgs/msg/JointState",
    CAMERA: "sensor_msgs/msg/CompressedImage",
    COMMAND: "std_msgs/msg/Float64MultiArray",
    ACTIVE: "std_msgs/msg/Bool",
}
NANO = 10**9
MAPPING = """\
rate: 20
task: wave
features:
  state: {from: /joint_states, field: position, names: [a, b]}
  image.cam: /cam/compressed
  action: /commands
"""


def joints(index: int) -> tuple[list[str], list[float]]:
    """Names and positions at 100 Hz; their order changes from message to message."""
    pair = [("a", np.sin(index / 100)), ("b", float(index))]
    names, positions = zip(*(pair if index % 2 else pair[::-1]), strict=True)
    return list(names), [float(each) for each in positions]


def picture(index: int) -> bytes:
    """JPEG of one colour."""
    file = io.BytesIO()
    Image.fromarray(np.full((24, 32, 3), index, np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def messages(make: Callable[..., Any], stamped: bool = True) -> Iterator[tuple[str, Any, int]]:
    """Topic, message and time of recording [ns] of two seconds; `make` builds a message by its type."""
    rng = np.random.default_rng(0)
    start = 1_000 * NANO
    for index in range(200):
        stamp = start + index * NANO // 100 + int(rng.integers(0, 2_000_000))
        sec, nanosec = divmod(stamp, NANO) if stamped else (0, 0)
        header = make("std_msgs/msg/Header", stamp=make("builtin_interfaces/msg/Time", sec=sec, nanosec=nanosec))
        names, positions = joints(index)
        numbers = {"position": np.array(positions), "velocity": np.zeros(0), "effort": np.zeros(0)}
        yield STATE, make(TYPES[STATE], header=header, name=names, **numbers), stamp + 5_000_000
        if index % 3 == 0:
            data = np.frombuffer(picture(index), np.uint8)
            image = make(TYPES[CAMERA], header=header, format="rgb8; jpeg compressed bgr8", data=data)
            yield CAMERA, image, stamp + 20_000_000
        if index % 5 == 0:
            layout = make("std_msgs/msg/MultiArrayLayout", dim=[], data_offset=0)
            yield COMMAND, make(TYPES[COMMAND], layout=layout, data=np.array([index, -index], float)), stamp + 1_000_000
        if index in (0, 50, 100, 150):
            yield ACTIVE, make(TYPES[ACTIVE], data=index in (0, 100)), stamp + 1_000_000


def write_rosbag2(path: Path, storage: str, **options: Any) -> Path:
    """A folder of rosbag 2 in `SQLITE3` or `MCAP`."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)

    def make(kind: str, **fields: Any) -> Any:
        return store.types[kind](**({"frame_id": ""} | fields if kind == "std_msgs/msg/Header" else fields))

    with Writer(path, version=9, storage_plugin=StoragePlugin[storage]) as writer:
        connections = {topic: writer.add_connection(topic, kind, typestore=store) for topic, kind in TYPES.items()}
        for topic, message, received in sorted(messages(make, **options), key=lambda entry: entry[2]):
            writer.write(connections[topic], received, store.serialize_cdr(message, TYPES[topic]))
    return path


def write_rosbag1(path: Path) -> Path:
    """A file of rosbag 1."""
    from rosbags.rosbag1 import Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS1_NOETIC)

    def make(kind: str, **fields: Any) -> Any:
        return store.types[kind](**({"frame_id": "", "seq": 0} | fields if kind == "std_msgs/msg/Header" else fields))

    with Writer(path) as writer:
        connections = {topic: writer.add_connection(topic, kind, typestore=store) for topic, kind in TYPES.items()}
        for topic, message, received in sorted(messages(make), key=lambda entry: entry[2]):
            writer.write(connections[topic], received, store.serialize_ros1(message, TYPES[topic]))
    return path


def write_bag(path: Path, kind: str) -> Path:
    """A recording in the container `sqlite`, `mcap`, `bare` (an MCAP file without folder) or `ros1`."""
    if kind == "ros1":
        return write_rosbag1(path.with_suffix(".bag"))
    folder = write_rosbag2(path, "SQLITE3" if kind == "sqlite" else "MCAP")
    return folder if kind != "bare" else next(folder.glob("*.mcap"))
