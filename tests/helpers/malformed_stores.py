"""Malformed folders: stores of zarr, datasets of Minari, and recordings of ROS."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import foreign_bags as bags
import numpy as np
from malformed import Damage, byte_damages, episode_end_damages, hdf5_damages


def json_damages(name: str) -> Iterator[tuple[str, Damage]]:
    """A JSON file of a folder that is missing, cut, or holds something else."""
    for content in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"a": NaN'):
        yield f"{name}: {content[:8]!r}", lambda path, content=content: (path / name).write_bytes(content)


def _edit_json(path: Path, name: str, **entries: Any) -> None:
    found = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**found, **entries}))


def _rewritten(path: Path, name: str, value: Any) -> None:
    """Write an array of a store again."""
    import zarr

    group = zarr.open_group(path, mode="a")
    shutil.rmtree(path / name)
    group.create_array(name, data=value)


def zarr_damages() -> Iterator[tuple[str, Damage]]:
    """Damages of a store of zarr in format 2."""
    for name in ("data/action/.zarray", "meta/episode_ends/.zarray", ".zgroup"):
        yield from json_damages(name)
    for array in ("data/action", "data/image"):
        entries: dict[str, dict[str, Any]] = {
            "gigantic": {"shape": [2**50, 2]},
            "gigantic chunks": {"chunks": [2**50, 2]},
            "negative": {"shape": [-1, 2]},
            "fractional shape": {"shape": [2.5, 2]},
            "no shape": {"shape": None},
            "text shape": {"shape": "26"},
            "chunks of 0": {"chunks": [0, 0]},
            "objects": {"dtype": "|O"},
            "objects by pickle": {"dtype": "|O", "filters": [{"id": "pickle", "protocol": 5}]},
            "text": {"dtype": "<U4"},
            "dates": {"dtype": "<M8[s]"},
            "unknown type": {"dtype": "<q9"},
            "pickle": {"filters": [{"id": "pickle", "protocol": 5}]},
            "unknown codec": {"compressor": {"id": "zip9000"}},
            "no codec name": {"compressor": {"level": 3}},
            "codec a text": {"compressor": "blosc"},
            "another codec": {"compressor": {"id": "zlib", "level": 1}},
            "another type": {"dtype": "<f2"},
        }
        for what, entry in entries.items():
            yield f"{array} {what}", partial(_edit_json, name=f"{array}/.zarray", **entry)
    for what, ends in episode_end_damages().items():
        yield f"ends {what}", partial(_rewritten, name="meta/episode_ends", value=ends)
    yield "actions infinite", partial(_rewritten, name="data/action", value=np.full((26, 2), np.inf))
    yield "actions too short", partial(_rewritten, name="data/action", value=np.zeros((20, 2)))
    yield "no arrays", lambda path: shutil.rmtree(path / "data")
    yield "no ends", lambda path: shutil.rmtree(path / "meta")
    for what, content in (("cut", b"\x02\x01"), ("noise", bytes(range(200))), ("empty", b"")):
        yield f"chunk {what}", lambda path, content=content: (path / "data/action/0.0").write_bytes(content)
    yield "a link elsewhere", lambda path: (path / "data/other").symlink_to("/etc")


def zip_damages() -> Iterator[tuple[str, Damage]]:
    """Damages of a zipped store."""
    import zipfile

    yield from byte_damages(40)

    def added(path: Path, name: str) -> None:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, b"{}")

    for name in ("../evil/.zarray", "/evil", "data/../../evil", "data/x/.zarray"):
        yield f"member {name}", partial(added, name=name)


def minari_damages(data: str) -> Iterator[tuple[str, Damage]]:
    """Damages of a dataset of Minari in HDF5."""

    def inside(damage: Damage) -> Damage:
        return lambda path: damage(path / f"data/{data}")

    yield from json_damages("data/metadata.json")
    for name, damage in (
        *byte_damages(8),
        *hdf5_damages("episode_0/actions", "episode_0/observations/state", "episode_0/rewards"),
    ):
        yield name, inside(damage)
    yield "no metadata", lambda path: (path / "data/metadata.json").unlink()


def arrow_damages() -> Iterator[tuple[str, Damage]]:
    """Damages of a dataset of Minari in Arrow."""
    import pyarrow as pa

    part = "data/0/part-0.arrow"

    def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
        with pa.OSFile(str(path / part)) as file:
            table = pa.ipc.open_file(file).read_all()
        columns: dict[str, Any] = {name: table[name].combine_chunks() for name in table.column_names}
        change(columns)
        new = pa.table(columns)
        with pa.OSFile(str(path / part), "wb") as sink, pa.ipc.new_file(sink, new.schema) as writer:
            writer.write_table(new)

    yield from json_damages("data/metadata.json")
    for name, damage in byte_damages(24):
        yield name, lambda path, damage=damage: damage(path / part)
    values: dict[str, Any] = {
        "text": ["a"] * 6,
        "missing values": [None] * 6,
        "lists of any length": [[1.0], [1.0, 2.0], [], [1.0], [1.0], [1.0]],
        "dates": pa.array([0] * 6, pa.date32()),
        "structures": [{"x": 1.0}] * 6,
        "not numbers": [[np.nan, 0.0]] * 6,
    }
    for name in ("actions", "rewards"):
        for what, value in values.items():
            if (name, what) == ("actions", "not numbers"):
                value = pa.array(value, pa.list_(pa.float64(), 2))
            yield f"{name} {what}", partial(rewritten, change=lambda found, n=name, v=value: found.__setitem__(n, v))
        yield f"{name} missing", partial(rewritten, change=lambda found, name=name: found.pop(name))
    yield "observations missing", partial(rewritten, change=lambda found: found.pop("observations"))
    yield "no file", lambda path: (path / part).unlink()
    yield "no episodes", lambda path: [shutil.rmtree(path / f"data/{index}") for index in range(3)]
    yield "no metadata", lambda path: (path / "data/metadata.json").unlink()


def recording_damages(file: str = "") -> Iterator[tuple[str, Damage]]:
    """Damages of the bytes of a recording, in the file `file` of its folder."""
    for name, damage in byte_damages(40):
        yield name, lambda path, damage=damage: damage(path / file if file else path)


def rosbag2_damages(file: str) -> Iterator[tuple[str, Damage]]:
    """Damages of a folder of rosbag 2."""
    yield from recording_damages(file)
    for content in (b"", b"{", b"[1]", b"a: [", b"\xff\xfe", b"rosbag2_bagfile_information: 3", b"[" * 5_000):
        yield f"metadata {content[:8]!r}", lambda path, content=content: (path / "metadata.yaml").write_bytes(content)
    for names in ("['../../other.db3']", "['/etc/passwd']", "[]", "[missing.db3]", "3"):
        yield f"files {names}", partial(_rename_files, names=names, file=file)
    yield "no file", lambda path: (path / file).unlink()
    for old, new in (
        ("message_count:\n  - ", "message_count:\n  - null\n  - "),
        ("name: /active", "name: 3"),
        ("name: /active", "name: [/active]"),
        ("type: std_msgs/msg/Bool", "type: 3"),
    ):
        yield f"metadata with {new!r}", partial(_replace_text, old=old, new=new)


def _replace_text(path: Path, old: str, new: str) -> None:
    text = (path / "metadata.yaml").read_text()
    assert old in text
    (path / "metadata.yaml").write_text(text.replace(old, new, 1))


def _rename_files(path: Path, names: str, file: str) -> None:
    text = (path / "metadata.yaml").read_text()
    import re

    changed = re.sub(r"relative_file_paths:\n(\s+- .*\n)+", f"relative_file_paths: {names}\n", text)
    assert changed != text
    (path / "metadata.yaml").write_text(changed)


def message_damages() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Contents of messages that no mapping fits: topic and function that changes the fields of its messages."""
    return {
        "positions not finite": (bags.STATE, lambda fields: {**fields, "position": fields["position"] * np.nan}),
        "positions missing": (bags.STATE, lambda fields: {**fields, "position": np.zeros(0)}),
        "fewer positions than names": (bags.STATE, lambda fields: {**fields, "position": fields["position"][:1]}),
        "other joints": (bags.STATE, lambda fields: {**fields, "name": ["c", "d"]}),
        "no image": (bags.CAMERA, lambda fields: {**fields, "data": np.zeros(20, np.uint8)}),
        "half an image": (bags.CAMERA, lambda fields: {**fields, "data": fields["data"][:200]}),
        "commands not finite": (bags.COMMAND, lambda fields: {**fields, "data": np.array([np.inf, 0.0])}),
        "commands without numbers": (bags.COMMAND, lambda fields: {**fields, "data": np.zeros(0)}),
    }
