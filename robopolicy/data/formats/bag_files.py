"""Access to the messages of recordings: rosbag 1, rosbag 2 (SQLite, MCAP) and bare MCAP files, through rosbags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robopolicy.data.formats.foreign import MAX_TEXT, foreign_errors
from robopolicy.errors import UserError
from robopolicy.files import parse_yaml
from robopolicy.optional import require

SUFFIXES = (".bag", ".mcap", ".db3")
METADATA = "metadata.yaml"
REPAIR_HINT = "if it is an incomplete MCAP file, --repair reads it up to its damage"


@dataclass(frozen=True)
class BagMessage:
    """Message of a recording."""

    topic: str
    kind: str  # ROS name of its type
    received: int  # [ns] time of recording
    content: Any  # dataclass with the fields of its type


class BagFile:
    """One recording, whose messages are decoded as they are iterated.

    Args:
        path: File, or folder of rosbag 2.
        definitions: Folder of `.msg` files, for recordings without definitions; empty: the types of ROS 2 Jazzy.

    Raises:
        UserError: It cannot be read.
    """

    def __init__(self, path: Path, definitions: str = "") -> None:
        highlevel = require("rosbags.highlevel", "record")
        self.path, self._stack = path, ExitStack()
        _check_metadata(path)
        for file in path.glob("*.db3") if path.is_dir() else [path]:
            _check_sqlite(file)
        try:
            with foreign_errors(path):
                self._reader = highlevel.AnyReader([path], default_typestore=_typestore(definitions))
                self._stack.enter_context(self._reader)
        except UserError as error:
            if "Invalid bag metadata" in str(error):  # the reason names internals of rosbags
                raise _damaged_metadata(path) from error
            hint = f" ({REPAIR_HINT})" if path.suffix == ".mcap" else ""
            raise UserError(f"{str(error).rstrip('.')}{hint}.") from error
        self.topics = {each.topic: each.msgtype for each in self._reader.connections}

    def messages(
        self, topics: Sequence[str], start: int | None = None, stop: int | None = None
    ) -> Iterator[BagMessage]:
        """Yield the messages of some topics in order of their recording, within `[start, stop)` [ns]."""
        chosen = [each for each in self._reader.connections if each.topic in topics]
        if not chosen:
            return
        for connection, received, data in self._reader.messages(chosen, start, stop):
            try:
                content = self._reader.deserialize(data, connection.msgtype)
            except KeyError as error:  # its type, or one inside
                text = f"The recording has no definition of {error.args[0]}, of {connection.topic}"
                raise UserError(f"{text}; set 'definitions' to a folder of .msg files with it.") from error
            yield BagMessage(connection.topic, connection.msgtype, received, content)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


class RepairedMcap:
    """Messages of an MCAP file before its damage, in memory; the interface of `BagFile`."""

    def __init__(self, path: Path) -> None:
        stream = require("mcap.stream_reader", "record")
        typesys = require("rosbags.typesys", "record")
        self.path, self.topics = path, dict[str, str]()
        self._store = typesys.get_typestore(typesys.Stores.EMPTY)
        self._records: list[tuple[str, int, bytes]] = []
        schemas, channels, types = dict[int, Any](), dict[int, Any](), dict[str, Any]()
        damage = "it is complete"
        with path.open("rb") as file:
            try:
                for record in stream.StreamReader(file, emit_chunks=False).records:
                    name = type(record).__name__
                    if name == "Schema":
                        schemas[record.id] = record
                    elif name == "Channel":
                        channels[record.id] = record
                    elif name == "Message":
                        self._records.append((channels[record.channel_id].topic, record.log_time, record.data))
            except Exception as error:  # damaged records raise errors of any type
                damage = " ".join((str(error) or type(error).__name__).split())
        for channel in channels.values():
            schema = schemas.get(channel.schema_id)
            if schema is not None and schema.encoding == "ros2msg" and channel.message_encoding == "cdr":
                types |= typesys.get_types_from_msg(schema.data.decode(), schema.name)
                self.topics[channel.topic] = schema.name
        self._records.sort(key=lambda record: record[1])
        self._store.register(types)
        self.note = f"{path.name}: {len(self._records)} messages were read before the damage ({damage})"

    def messages(
        self, topics: Sequence[str], start: int | None = None, stop: int | None = None
    ) -> Iterator[BagMessage]:
        """Yield the messages of some topics in order of their recording, within `[start, stop)` [ns]."""
        for topic, received, data in self._records:
            inside = (start is None or received >= start) and (stop is None or received < stop)
            if topic in topics and topic in self.topics and inside:
                kind = self.topics[topic]
                yield BagMessage(topic, kind, received, self._store.deserialize_cdr(data, kind))

    def close(self) -> None:
        """Do nothing: no file is open."""


def recordings(path: Path) -> list[Path]:
    """Recordings at a path: itself, or the files and folders of recordings in a folder, sorted by name."""
    if path.is_file() or (path / METADATA).is_file():
        return [path]
    inner = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES or (each / METADATA).is_file())
    if not inner:
        raise UserError(f"{path} contains no recordings ({', '.join(SUFFIXES)} or folders with {METADATA}).")
    return inner


def _check_metadata(path: Path) -> None:
    """Check that a folder of rosbag 2 names its own files only."""
    if not path.is_dir():
        return
    with foreign_errors(path):
        file = path / METADATA
        if file.stat().st_size > MAX_TEXT:
            raise UserError(f"{METADATA} has more than {MAX_TEXT} bytes.")
        found = parse_yaml(file.read_text(encoding="utf-8"))
        info = found.get("rosbag2_bagfile_information") if isinstance(found, dict) else None
        names = info.get("relative_file_paths") if isinstance(info, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{METADATA} does not list the files of a recording.")
        if not _has_plain_entries(info):
            raise _damaged_metadata(path)
        for name in names:
            if not (path / name).resolve().is_relative_to(path.resolve()):
                raise UserError(f"{METADATA} names the file '{name}' outside of the recording.")


def _has_plain_entries(info: Any) -> bool:
    """Whether the entries of which rosbags computes have the types that it expects."""
    try:
        topics = [each["topic_metadata"] for each in info["topics_with_message_count"]]
        texts = [each[name] for each in topics for name in ("name", "type", "serialization_format")]
        times = (info["duration"]["nanoseconds"], info["starting_time"]["nanoseconds_since_epoch"])
    except (KeyError, TypeError):
        return False
    return all(isinstance(text, str) for text in texts) and all(type(time) is int for time in times)


def _damaged_metadata(path: Path) -> UserError:
    return UserError(f"{path}: an entry of {METADATA} is damaged; copy or record it again.")


def _check_sqlite(path: Path) -> None:
    """Check that a database has all pages that its header declares; SQLite reads missing ones as zeros."""
    with path.open("rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3"):
        return
    size, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    declared = (65536 if size == 1 else size) * pages
    if len(header) < 100 or path.stat().st_size < declared:
        raise UserError(f"{path} is cut off: it has {path.stat().st_size} of {declared} bytes.")


def _typestore(definitions: str) -> Any:
    typesys = require("rosbags.typesys", "record")
    store = typesys.get_typestore(typesys.Stores.ROS2_JAZZY)
    if not definitions:
        return store
    folder, types = Path(definitions), dict[str, Any]()
    for file in sorted(folder.rglob("*.msg")):
        package = file.parent.parent.name if file.parent.name == "msg" else file.parent.name
        with foreign_errors(file):
            types |= typesys.get_types_from_msg(file.read_text(encoding="utf-8"), f"{package}/msg/{file.stem}")
    if not types:
        raise UserError(f"'definitions' names {folder}, which has no .msg files.")
    store.register({name: entry for name, entry in types.items() if name not in store.fielddefs})
    return store
