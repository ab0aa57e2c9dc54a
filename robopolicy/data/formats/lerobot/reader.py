"""Reader of LeRobotDataset v3.0 and v2.1 into `Episodes`."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from robopolicy.atomic import restore_partial
from robopolicy.data.episodes import Array, Episodes
from robopolicy.data.formats.lerobot import layout
from robopolicy.data.formats.lerobot.images import decode_image, decode_video
from robopolicy.data.formats.lerobot.layout import check_entries, check_info, integer_entry, reading
from robopolicy.data.statistics import Statistics
from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy.plurals import counted

MAX_ROWS, MAX_ROWS_PER_BYTE = 2**30, 10_000  # of a parquet file; constant columns compress well


@dataclass(frozen=True)
class EpisodeFiles:
    """Row of an episode: its files, and its position in them."""

    index: int
    length: int
    seed: int
    behaviour: str
    data: Path
    videos: dict[str, tuple[Path, float]]  # feature: (file, second at which the episode starts)


def read_lerobot(path: str | Path, *, episodes: Sequence[int] | None = None, images: bool = True) -> Episodes:
    """Read the folder `path` into memory: all episodes or the given indices, with or without the cameras."""
    root, files = Path(path), DatasetFiles.open(path)
    try:
        with reading(root):
            return _read(files, episodes, images)
    except UserError as error:  # errors about the content lack the path
        raise error if str(root) in str(error) else UserError(f"{root}: {error}") from error


def camera_shapes(path: str | Path) -> dict[str, tuple[int, int, int]]:
    """Shapes `(3, height, width)` of the cameras of a dataset, without decoding images."""
    shapes: dict[str, tuple[int, int, int]] = {}
    for name, feature in DatasetFiles(Path(path)).features.items():
        if feature["dtype"] in ("image", "video"):
            first, second, third = feature["shape"]
            height, width = (second, third) if first == 3 else (first, second)
            shapes[str(layout.key_of(name, camera=True))] = (3, height, width)
    return shapes


def _read(source: DatasetFiles, episodes: Sequence[int] | None, images: bool) -> Episodes:
    rows = source.rows(episodes)
    features = source.features
    cameras = source.cameras if images else []
    vectors = [name for name, feature in features.items() if _is_vector(name, feature)]
    embedded = [name for name in cameras if features[name]["dtype"] == "image"]
    table = source.frames(rows, vectors + embedded)
    lengths = np.array([row.length for row in rows], np.int64)
    ends = np.cumsum(lengths)
    columns = {name: column_numbers(name, table[name], features[name]["shape"]) for name in vectors}
    arrays: dict[str, Array] = {}
    for name, values in columns.items():
        key = layout.key_of(name, camera=False)
        if key is not None:
            arrays[key] = values if _has_shape(name) else values.reshape(-1)
    if layout.DONE in columns:
        arrays["terminated"] = _terminated(columns, ends)
    for name in cameras:
        frames = _embedded_images(name, table[name]) if name in embedded else _video_images(rows, name, source.rate)
        arrays[str(layout.key_of(name, camera=True))] = frames
    first = column_numbers("task_index", table["task_index"], [1]).reshape(-1)[ends - lengths]
    tasks = source.tasks()
    return Episodes(
        arrays=arrays,
        action_type=layout.action_type_of(features["action"]),
        ends=ends,
        tasks=tuple(tasks.get(int(index), "") for index in first),
        seeds=np.array([row.seed for row in rows], np.int64),
        control_dt=float(1 / source.rate),
        behaviours=tuple(row.behaviour for row in rows),
        names={
            key: entry_names
            for name in vectors
            if (key := layout.key_of(name, camera=False)) in arrays and (entry_names := layout.names_of(features[name]))
        },
    )


class DatasetFiles:
    """The metadata of a dataset and its files; numbers of frames are read, videos are not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with reading(root / layout.INFO):
            self.info = check_info(parse_json((root / layout.INFO).read_text(encoding="utf-8")))
            self.version = str(self.info["codebase_version"])
            self.features: dict[str, dict[str, Any]] = self.info["features"]
            self.rate = Fraction(self.info["fps"]).limit_denominator(10_000)
        if self.version not in ("v2.1", layout.VERSION):
            raise UserError(
                f"{root} has LeRobot format {self.version}; this version reads v2.1 and {layout.VERSION}: "
                "convert it with the tools of LeRobot."
            )

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the dataset at `path`; raises a UserError if there is none or its description is damaged."""
        root = Path(path)
        restore_partial(root)
        if not (root / layout.INFO).is_file():
            hint = "check the path, or convert another format with 'robopolicy data convert'"
            raise UserError(f"No LeRobot dataset at {root}: {layout.INFO} is missing; {hint}.")
        return cls(root)

    @property
    def cameras(self) -> list[str]:
        """Names of the features that are images or videos."""
        return [name for name, feature in self.features.items() if feature["dtype"] in ("image", "video")]

    def camera_statistics(self) -> dict[int, dict[str, Statistics]]:
        """Stored statistics of the cameras by episode, `{episode: {feature: statistics}}`; empty in format v2.1."""
        found: dict[int, dict[str, Statistics]] = {}
        for file in self._episode_files() if self.version == layout.VERSION else ():
            with reading(file):
                stored = pq.read_schema(file).names
                names = {name: f"stats/{name}/" for name in self.cameras}
                columns = [column for column in stored if column.startswith(tuple(names.values()))] if names else []
                for entry in _table(file, ["episode_index", *columns]).to_pylist():
                    found[integer_entry(entry, "episode_index")] = {
                        name: _statistics(entry, prefix) for name, prefix in names.items()
                    }
        return found

    def rows(self, chosen: Sequence[int] | None) -> list[EpisodeFiles]:
        """Episodes to read, sorted by index."""
        rows = self._rows_v30() if self.version == layout.VERSION else self._rows_v21()
        rows.sort(key=lambda row: row.index)
        if chosen is not None:
            missing = set(chosen) - {row.index for row in rows}
            if missing:
                raise UserError(
                    f"{self.root} has {counted(len(rows), 'episode')}; episode {min(missing)} is not among them."
                )
            rows = [row for row in rows if row.index in set(chosen)]
        if not rows:
            raise UserError(f"{self.root} contains no episodes.")
        return rows

    def tasks(self) -> dict[int, str]:
        """Task text by index."""
        if self.version != layout.VERSION:
            lines = self._lines("meta/tasks.jsonl")
            with reading(self.root / "meta/tasks.jsonl"):
                return {integer_entry(line, "task_index"): str(line["task"]) for line in lines}
        with reading(self.root / layout.TASKS):
            table = _table(self.root / layout.TASKS)
            name = "task" if "task" in table.column_names else "__index_level_0__"
            check_entries(table.column_names, ("task_index", name), "column")
            if not all(isinstance(text, str) for text in table[name].to_pylist()):
                raise ValueError(f"column '{name}' must hold texts")
            return dict(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))

    def frames(self, rows: Sequence[EpisodeFiles], names: Sequence[str]) -> pa.Table:
        """Columns of the chosen episodes, in order of episode and frame."""
        index = ["episode_index", "frame_index", "task_index"]
        required = np.array([row.index for row in rows])
        parts: list[pa.Table] = []
        for file in dict.fromkeys(row.data for row in rows):
            with reading(file):
                part = _table(file, [*dict.fromkeys([*names, *index])])
                parts.append(part.filter(pa.array(np.isin(part["episode_index"].to_numpy(), required))))
        with reading(self.root / "data"):
            for part in parts:
                _check_indices(part, index)
            table = pa.concat_tables(part.replace_schema_metadata(None) for part in parts)
            episode, frame = table["episode_index"].to_numpy(), table["frame_index"].to_numpy()
            order = np.lexsort((frame, episode))
            if np.any(np.diff(order) != 1):
                table = table.take(pa.array(order))
        found = dict(zip(*np.unique(episode, return_counts=True), strict=True))
        for row in rows:
            if found.get(row.index, 0) != row.length:
                raise UserError(
                    f"{self.root} is incomplete: episode {row.index} should have {row.length} frames, "
                    f"found {found.get(row.index, 0)}; copy or collect it again."
                )
        if not np.array_equal(frame[order], np.concatenate([np.arange(row.length) for row in rows])):
            raise UserError(f"{self.root}: 'frame_index' does not count the frames of an episode; collect it again.")
        return table

    def _rows_v30(self) -> list[EpisodeFiles]:
        rows: list[EpisodeFiles] = []
        videos = [name for name, feature in self.features.items() if feature["dtype"] == "video"]
        for file in self._episode_files():
            with reading(file):
                names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
                for entry in _table(file, names).to_pylist():
                    locations = {name: _location(entry, f"videos/{name}/") for name in videos}
                    rows.append(
                        EpisodeFiles(
                            index=integer_entry(entry, "episode_index"),
                            length=integer_entry(entry, "length", 1),
                            seed=-1 if entry.get("seed") is None else integer_entry(entry, "seed", -1),
                            behaviour=str(entry.get("behaviour") or ""),
                            data=self._file(self.info["data_path"], **_location(entry, "data/")),
                            videos={
                                name: (
                                    self._file(self.info["video_path"], video_key=name, **place),
                                    float(entry[f"videos/{name}/from_timestamp"]),
                                )
                                for name, place in locations.items()
                            },
                        )
                    )
        return rows

    def _episode_files(self) -> list[Path]:
        files = sorted((self.root / "meta/episodes").glob("*/*.parquet"))
        if not files:
            raise UserError(f"{self.root} is incomplete: meta/episodes has no files; copy or collect it again.")
        return files

    def _rows_v21(self) -> list[EpisodeFiles]:
        rows: list[EpisodeFiles] = []
        videos = [name for name, feature in self.features.items() if feature["dtype"] == "video"]
        lines = self._lines("meta/episodes.jsonl")
        with reading(self.root / "meta/episodes.jsonl"):
            for line in lines:
                episode = integer_entry(line, "episode_index")
                place = {
                    "episode_chunk": episode // integer_entry(self.info, "chunks_size", 1),
                    "episode_index": episode,
                }
                files = {name: (self._file(self.info["video_path"], video_key=name, **place), 0.0) for name in videos}
                data = self._file(self.info["data_path"], **place)
                rows.append(EpisodeFiles(episode, integer_entry(line, "length", 1), -1, "", data, files))
        return rows

    def _lines(self, name: str) -> list[dict[str, Any]]:
        with reading(self.root / name):
            return [parse_json(line) for line in (self.root / name).read_text(encoding="utf-8").split("\n") if line]

    def _file(self, template: str, **place: Any) -> Path:
        file = self.root / template.format(**place)
        real, root = (Path(os.path.realpath(path)) for path in (file, self.root))  # a loop of links is a missing file
        if not real.is_relative_to(root):
            raise ValueError(f"file '{template}' lies outside of the dataset")
        return file


def _is_vector(name: str, feature: dict[str, Any]) -> bool:
    numeric = feature["dtype"] == "bool" or str(feature["dtype"]).startswith(("float", "int", "uint"))
    return numeric and (layout.key_of(name, camera=False) is not None or name in (layout.DONE, layout.TRUNCATED))


def _has_shape(name: str) -> bool:
    return name in ("action", "executed", "policy_action") or name.startswith("observation.")


def _location(entry: dict[str, Any], prefix: str) -> dict[str, int]:
    return {name: integer_entry(entry, prefix + name) for name in ("chunk_index", "file_index")}


def _table(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, or some of its columns."""
    if not file.is_file():
        raise ValueError("the file does not exist")
    metadata = pq.read_metadata(file)
    rows, size = metadata.num_rows, file.stat().st_size
    if rows > MAX_ROWS or rows > MAX_ROWS_PER_BYTE * size:
        raise ValueError(f"it declares {rows} rows in {size} bytes")
    check_entries(metadata.schema.to_arrow_schema().names, columns or (), "column")
    return pq.read_table(file, columns=columns)


def _check_indices(part: pa.Table, names: Sequence[str]) -> None:
    """Check the columns that order the frames."""
    for name in names:
        column = part[name]
        if not pa.types.is_integer(column.type) or column.null_count:
            found = f"{column.type} with {column.null_count} missing"
            raise ValueError(f"column '{name}' must hold integers, found {found}")


def column_numbers(name: str, column: pa.ChunkedArray, shape: Sequence[int]) -> Array:
    """Convert a column to an array `(F, *shape)`."""
    array, missing = column.combine_chunks(), column.null_count
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
        missing += array.null_count
    kind = array.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"column '{name}' must hold numbers, found {kind}")
    if missing or len(array) != len(column) * math.prod(shape):
        required = " x ".join(map(str, shape)) or "1"
        raise ValueError(f"column '{name}' must hold {required} numbers in every frame, but some are missing")
    return array.to_numpy(zero_copy_only=False).reshape(len(column), *shape)


def _terminated(columns: dict[str, Array], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True on the last frame of the episodes that reached a terminal state."""
    done = columns[layout.DONE].reshape(-1).astype(np.bool_)
    if layout.TRUNCATED in columns:
        done = done & ~columns[layout.TRUNCATED].reshape(-1).astype(np.bool_)
    last = np.zeros(len(done), np.bool_)
    last[ends - 1] = True
    return done & last


def _statistics(entry: Mapping[str, Any], prefix: str) -> Statistics:
    """Statistics of a camera in the row of an episode; empty if some are missing, or are not of three channels."""
    stored = {column.removeprefix(prefix): value for column, value in entry.items() if column.startswith(prefix)}
    if any(stored.get(name) is None for name in ("mean", "std", "min", "max", "count")):
        return {}
    found = {name: np.array(value, np.float64) for name, value in stored.items() if value is not None}
    if any(values.size != (1 if name == "count" else 3) for name, values in found.items()):
        return {}
    if infinite := [name for name, values in found.items() if not np.isfinite(values).all()]:
        raise ValueError(f"column '{prefix}{infinite[0]}' must hold finite numbers")
    count = found.pop("count").reshape(1).astype(np.int64)
    return {**{name: values.reshape(3, 1, 1) for name, values in found.items()}, "count": count}


def _embedded_images(name: str, column: pa.ChunkedArray) -> NDArray[np.uint8]:
    encoded = [entry["bytes"] for entry in column.to_pylist()]
    if any(data is None for data in encoded):
        raise ValueError("images are not embedded in the parquet files")
    return np.stack([decode_image(data, f"'{name}'") for data in encoded])


def _video_images(rows: Sequence[EpisodeFiles], name: str, rate: Fraction) -> NDArray[np.uint8]:
    """Frames `(F, 3, height, width)` of one camera; every file is decoded once, in order."""
    targets: dict[Path, dict[int, int]] = defaultdict(dict)  # file: {frame of the video: frame of the dataset}
    total = 0
    for row in rows:
        file, start = row.videos[name]
        first = round(start * rate)
        targets[file] |= {first + offset: total + offset for offset in range(row.length)}
        total += row.length
    images: NDArray[np.uint8] | None = None
    for file, target in targets.items():
        with reading(file):
            for index, image in decode_video(file, rate):
                if images is None:
                    images = np.empty((total, *image.shape), np.uint8)
                if index in target:
                    images[target.pop(index)] = image
            if target:
                raise ValueError(f"{len(target)} video frames are missing")
    assert images is not None
    return images
