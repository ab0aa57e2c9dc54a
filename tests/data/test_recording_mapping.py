"""Settings of the mapping of recordings: definitions of messages, depth images, and pauses that separate episodes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats import read_dataset
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import UserError

pytest.importorskip("rosbags", reason="needs robopolicy[record]")
pytest.importorskip("mcap", reason="needs robopolicy[record]")
NANO, START = 10**9, 1_000 * 10**9
NUMBERS, IMAGE, PACKED = "std_msgs/msg/Float64MultiArray", "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
GRIP = "hand_msgs/msg/Grip"
BASIC = "rate: 10\nfeatures:\n  state: /state\n  action: /state\n"


def write(
    path: Path, topics: dict[str, str], times: Sequence[float], fields: Callable[..., Any], **storage: Any
) -> Path:
    """A recording with one message of each topic at each time [s]; `fields(store, topic, index)` are its fields."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    store.register(get_types_from_msg("float64 width\nhand_msgs/Finger[] fingers\n", GRIP))
    store.register(get_types_from_msg("float64 force\n", "hand_msgs/msg/Finger"))
    options = {"version": 9, "storage_plugin": StoragePlugin.MCAP, **storage}
    with Writer(path, **options) as writer:
        connections = {topic: writer.add_connection(topic, kind, typestore=store) for topic, kind in topics.items()}
        for index, time in enumerate(times):
            for topic, kind in topics.items():
                message = store.types[kind](**fields(store, topic, index))
                writer.write(connections[topic], START + round(time * NANO), store.serialize_cdr(message, kind))
    return path


def numbers(store: Any, index: int) -> dict[str, Any]:
    """Fields of a Float64MultiArray with the index."""
    return {
        "layout": store.types["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0),
        "data": np.array([index, 1.0]),
    }


def header(store: Any) -> Any:
    """A header without a stamp."""
    return store.types["std_msgs/msg/Header"](
        stamp=store.types["builtin_interfaces/msg/Time"](sec=0, nanosec=0), frame_id=""
    )


def read(path: Path, tmp_path: Path, text: str) -> Episodes:
    """All episodes of a recording under a mapping."""
    (tmp_path / "mapping.yaml").write_text(f"source: {path}\n{text}")
    return read_dataset(tmp_path / "mapping.yaml")


def pauses() -> Iterator[float]:
    """Times [s] of three parts at 10 Hz, before pauses of 1 s and 3 s."""
    for begin, count in ((0.0, 10), (1.9, 20), (6.8, 5)):
        yield from (begin + index / 10 for index in range(count))


@pytest.fixture(name="paused")
def _paused(tmp_path: Path) -> Path:
    return write(tmp_path / "bag", {"/state": NUMBERS}, [*pauses()], lambda store, topic, index: numbers(store, index))


@pytest.mark.parametrize(("gap", "lengths"), [(0.5, [10, 20, 5]), (2.0, [30, 5]), (5.0, [35])])
def test_a_pause_longer_than_the_gap_separates_episodes(
    gap: float, lengths: list[int], paused: Path, tmp_path: Path
) -> None:
    """Messages may be old within an episode, so that only the gap divides the recording; frames repeat in pauses."""
    found = read(paused, tmp_path, f"{BASIC}max_age: 10\ngap: {gap}\n")
    distinct = [len(np.unique(found.episode(index).arrays["state"][:, 0])) for index in range(found.num_episodes)]
    assert distinct == lengths
    assert found.arrays["state"][found.starts, 0].tolist() == np.cumsum([0, *lengths[:-1]]).tolist()


def test_without_a_gap_old_messages_divide_a_recording(paused: Path, tmp_path: Path) -> None:
    assert read(paused, tmp_path, f"{BASIC}max_age: 10\n").num_episodes == 1
    assert read(paused, tmp_path, f"{BASIC}max_age: 0.05\n").num_episodes == 3


def test_gaps_divide_the_episodes_of_a_topic(tmp_path: Path) -> None:
    """The second of two parts is marked, and has a pause."""

    def fields(store: Any, topic: str, index: int) -> dict[str, Any]:
        return numbers(store, index) if topic == "/state" else {"data": index >= 10}

    path = write(tmp_path / "bag", {"/state": NUMBERS, "/active": "std_msgs/msg/Bool"}, [*pauses()], fields)
    text = f"{BASIC}max_age: 10\ngap: 2\nepisodes: {{from: /active}}\n"
    found = read(path, tmp_path, text)
    assert found.num_episodes == 2 and found.arrays["state"][found.starts, 0].tolist() == [10, 30]


@pytest.mark.parametrize("gap", ["-1", "long", ".inf"])
def test_invalid_gaps_are_refused(gap: str, paused: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gap must"):
        read(paused, tmp_path, f"{BASIC}gap: {gap}\n")


MILLIMETRES = np.arange(12, dtype=np.uint16).reshape(3, 4) * 1000 + 7


def raw_depth(encoding: str, big: bool = False, padding: int = 0) -> Callable[[Any, int], dict[str, Any]]:
    """Fields of a depth image, of which message `index` is `index` mm further away."""

    def fields(store: Any, index: int) -> dict[str, Any]:
        values = MILLIMETRES + np.uint16(index)
        dtype = np.dtype(np.float32 if encoding == "32FC1" else np.uint16).newbyteorder(">" if big else "<")
        scaled = (values / 1000 if encoding == "32FC1" else values).astype(dtype)
        rows = np.pad(scaled.view(np.uint8).reshape(3, -1), ((0, 0), (0, padding)))
        sizes = {"height": 3, "width": 4, "step": rows.shape[1], "is_bigendian": int(big)}
        return {"header": header(store), "encoding": encoding, **sizes, "data": rows.reshape(-1)}

    return fields


def packed_depth(format: str, parameters: int = 0) -> Callable[[Any, int], dict[str, Any]]:
    """Fields of a compressed depth image: a PNG after so many bytes of parameters."""

    def fields(store: Any, index: int) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(MILLIMETRES + np.uint16(index)).save(file, "PNG")
        data = np.frombuffer(bytes(parameters) + file.getvalue(), np.uint8)
        return {"header": header(store), "format": format, "data": data}

    return fields


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (IMAGE, raw_depth("16UC1")),
        (IMAGE, raw_depth("16UC1", big=True)),
        (IMAGE, raw_depth("mono16", padding=6)),
        (IMAGE, raw_depth("32FC1")),
        (IMAGE, raw_depth("32FC1", big=True, padding=4)),
        (PACKED, packed_depth("16UC1; compressedDepth png", 12)),
        (PACKED, packed_depth("16UC1; png compressed ")),
    ],
    ids=["16UC1", "16UC1 big-endian", "mono16 padded", "32FC1", "32FC1 big-endian padded", "compressedDepth", "png"],
)
def test_depth_images_are_metres(kind: str, fields: Callable[[Any, int], dict[str, Any]], tmp_path: Path) -> None:
    """Also through a LeRobotDataset and back."""

    def content(store: Any, topic: str, index: int) -> dict[str, Any]:
        return numbers(store, index) if topic == "/state" else fields(store, index)

    path = write(tmp_path / "bag", {"/state": NUMBERS, "/depth": kind}, [index / 10 for index in range(5)], content)
    found = read(path, tmp_path, f"{BASIC}  depth.front: /depth\n")
    depth = found.arrays["depth.front"]
    assert depth.dtype == np.float32 and depth.shape == (5, 3, 4)
    for index, frame in enumerate(found.arrays["state"][:, 0]):
        np.testing.assert_allclose(depth[index], (MILLIMETRES + frame) / 1000, rtol=1e-6)
    assert main(["data", "convert", str(tmp_path / "mapping.yaml"), str(tmp_path / "set")]) == 0
    assert np.array_equal(read_lerobot(tmp_path / "set").arrays["depth.front"], depth)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (IMAGE, raw_depth("16UC1"), "'/depth' of episode .* holds no RGB images"),
        (PACKED, packed_depth("16UC1; png compressed "), "'/depth' of episode .* holds no RGB images"),
        (PACKED, packed_depth("png"), "'/depth' has 16 bits of grey"),
        (PACKED, packed_depth("32FC1; compressedDepth png", 12), "32FC1 is not read from compressedDepth"),
    ],
    ids=["raw", "16UC1", "png", "32FC1"],
)
def test_depth_is_no_colour_image(
    kind: str, fields: Callable[[Any, int], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    def content(store: Any, topic: str, index: int) -> dict[str, Any]:
        return numbers(store, index) if topic == "/state" else fields(store, index)

    path = write(tmp_path / "bag", {"/state": NUMBERS, "/depth": kind}, [0.0, 0.1, 0.2], content)
    with pytest.raises(UserError, match=message):
        read(path, tmp_path, f"{BASIC}  image.depth: /depth\n")


@pytest.fixture(name="gripped")
def _gripped(tmp_path: Path) -> Path:
    """A recording of a type that it does not define, as of rosbag 2 before Iron."""
    import sqlite3

    from rosbags.rosbag2 import StoragePlugin

    def fields(store: Any, topic: str, index: int) -> dict[str, Any]:
        finger = store.types["hand_msgs/msg/Finger"]
        return {"width": index / 100, "fingers": [finger(force=1.0 + index), finger(force=2.0)]}

    times = [index / 10 for index in range(5)]
    path = write(tmp_path / "bag", {"/grip": GRIP}, times, fields, version=8, storage_plugin=StoragePlugin.SQLITE3)
    with closing(sqlite3.connect(next(path.glob("*.db3")))) as database, database:
        database.execute("DROP TABLE message_definitions")
        database.execute("UPDATE schema SET schema_version = 3")
    return path


HAND = "rate: 10\nfeatures:\n  state: {from: /grip, field: width}\n  action: {from: /grip, field: fingers.0.force}\n"


def definitions(folder: Path, *, layout: str = "msg/") -> Path:
    """Folder of .msg files, one package, as a ROS workspace or without its folders `msg`."""
    for name, text in (("Grip", "float64 width\nFinger[] fingers  # two\n"), ("Finger", "float64 force\n")):
        file = folder / "hand_msgs" / layout / f"{name}.msg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize("layout", ["msg/", ""])
def test_types_come_from_the_definitions_of_a_folder(layout: str, gripped: Path, tmp_path: Path) -> None:
    """The folder is relative to the mapping file."""
    definitions(tmp_path / "types", layout=layout)
    found = read(gripped, tmp_path, f"{HAND}definitions: types\n")
    assert found.arrays["state"][:, 0].tolist() == [0, 0.01, 0.02, 0.03, 0.04]
    assert found.arrays["action"][:, 0].tolist() == [1, 2, 3, 4, 5]


def test_types_without_definitions_are_refused_with_the_setting(gripped: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no definition of hand_msgs/msg/Grip.*set 'definitions'"):
        read(gripped, tmp_path, HAND)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "which has no .msg files"),
        ({"hand_msgs/msg/Grip.msg": "float64 width\nFinger[] fingers\n"}, "Finger"),
        ({"hand_msgs/msg/Grip.msg": "float width width\n!"}, "Grip"),
        ({"hand_msgs/msg/Grip.msg": b"\xff\xfe"}, "mapping|types|Grip"),
        ({"hand_msgs/msg/Grip.msg": "int64 width\n"}, "/grip|Grip"),
    ],
    ids=["none", "a type is missing", "no definition", "no text", "another definition"],
)
def test_definitions_that_do_not_fit_are_refused(
    texts: dict[str, Any], message: str, gripped: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "types").mkdir()
    for name, text in texts.items():
        file = tmp_path / "types" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "mapping.yaml").write_text(f"source: {gripped}\n{HAND}definitions: types\n")
    line = refused("data", "convert", tmp_path / "mapping.yaml", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert any(part in line for part in message.split("|")), line
