"""Streaming writer of LeRobotDataset v3.0; the dataset appears at its path when it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from robopolicy.atomic import FolderWriter
from robopolicy.data.episodes import Array, Episode, Episodes, is_image
from robopolicy.data.formats.lerobot import layout
from robopolicy.data.formats.lerobot.images import VideoFiles, encode_png, image_column, video_encoder, video_info
from robopolicy.data.statistics import (
    Statistics,
    histogram_statistics,
    image_histogram,
    statistics_to_json,
    vector_statistics,
)
from robopolicy.errors import UserError, cannot_write
from robopolicy.files import check_new_folder

_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_ROWS_PER_WRITE = 100  # episode rows kept in memory between two writes


class LeRobotWriter:
    """Context manager that writes to a hidden sibling of `path`; a normal exit renames it, an exception deletes it.

    With `keep_on_error`, an exception outside of `add` keeps the episodes so far, such as demonstrations of a person.

    with LeRobotWriter("data/lift", control_dt=0.05) as writer:
        for episode in episodes:
            writer.add(episode)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        control_dt: float,
        video: bool = True,
        overwrite: bool = False,
        names: Mapping[str, Sequence[str]] | None = None,
        action_type: str = "",
        keep_on_error: bool = False,
        data_file_mb: int = layout.DATA_FILE_MB,
        video_file_mb: int = layout.VIDEO_FILE_MB,
    ) -> None:
        """Prepare `path`; an existing path raises an error unless `overwrite` is set and it is a dataset.

        Args:
            path: Folder to create.
            control_dt: Seconds between two frames.
            video: Store cameras as video if there is an encoder and the size is even; otherwise as lossless PNG.
            overwrite: Replace an existing dataset once the new one is complete.
            names: Optional names of the elements of vectors, by episode key.
            action_type: `absolute` or `delta` if actions are targets of a controller or changes; empty if unknown.
            keep_on_error: Complete the dataset of the episodes so far when the context ends with an exception.
            data_file_mb: Size at which a new parquet file begins [MB].
            video_file_mb: Size at which a new video file begins [MB].
        """
        self.path = Path(path).absolute()
        self._control_dt = control_dt
        self._rate = layout.frame_rate(control_dt)
        self._encoder = video_encoder() if video else None
        self._overwrite, self._keep_on_error = overwrite, keep_on_error
        self._names, self._action_type = dict(names or {}), action_type
        self._limits = {"data_file_mb": data_file_mb, "video_file_mb": video_file_mb}
        self._features: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, int] = {}
        self._episodes = self._frames = 0
        self._aborted = False
        self._rows: list[dict[str, Any]] = []
        self._histograms: dict[str, Any] = {}
        self._videos: dict[str, VideoFiles] = {}
        self._check_path()
        try:
            self._folder = FolderWriter(self.path)
            self._partial = self._folder.folder
            (self._partial / "meta").mkdir()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._data = ParquetFiles(self._partial, layout.DATA, data_file_mb << 20)
        self._metadata = ParquetFiles(self._partial, layout.EPISODES, data_file_mb << 20)

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (self._keep_on_error and self._episodes and not self._aborted):
            self.close()
        else:
            self.abort()

    def add(self, episode: Episode) -> None:
        """Append one episode; all must have the same keys and shapes."""
        for key, array in episode.arrays.items():
            layout.check_array(key, array)
        Episodes.from_list([episode], self._control_dt)  # rejects episodes that the reader would reject
        features = self._describe(episode)
        self._features = self._features or features
        if features != self._features:
            raise UserError(f"Episode {self._episodes} differs from the first one in keys, shapes or types.")
        with self._cleanup_on_error():
            self._write(episode)

    def close(self) -> None:
        """Complete the dataset and move it to its path."""
        if not self._episodes:
            self.abort()
            raise UserError(f"No episode was recorded, so {self.path} was not written.")
        with self._cleanup_on_error():
            self._flush_rows()
            self._data.close()
            self._metadata.close()
            for video in self._videos.values():
                video.close()
            self._write_meta()
            self._check_path()  # another process may have created it meanwhile
            self._folder.publish()

    def abort(self) -> None:
        """Remove everything written so far."""
        self._aborted = True
        for part in (self._data, self._metadata, *self._videos.values()):
            with suppress(OSError, pa.ArrowException, av.FFmpegError):  # the files are deleted anyway
                part.close()
        self._folder.discard()

    def _check_path(self) -> None:
        check_new_folder(self.path, "a dataset", layout.INFO, overwrite=self._overwrite)

    def _describe(self, episode: Episode) -> dict[str, dict[str, Any]]:
        features: dict[str, dict[str, Any]] = {}
        for key, array in episode.arrays.items():
            if key == "terminated":
                continue
            if is_image(key):
                height, width = int(array.shape[2]), int(array.shape[3])
                encoder = self._encoder if height % 2 == width % 2 == 0 else None  # yuv420p halves both sides
                info = video_info(encoder, height, width, self._rate) if encoder else None
                features[layout.feature_of(key)] = layout.image_feature(array, info)
            else:
                features[layout.feature_of(key)] = layout.vector_feature(array, self._names.get(key, ()))
        features["action"] = layout.action_feature(features["action"], self._action_type)
        if "terminated" in episode.arrays:
            flag = {"dtype": "bool", "shape": [1], "names": None}
            features |= {layout.DONE: flag, layout.TRUNCATED: flag}
        return features | layout.index_features()

    def _write(self, episode: Episode) -> None:
        length = len(episode)
        task = self._tasks.setdefault(episode.task, len(self._tasks))
        row: dict[str, Any] = {
            "episode_index": self._episodes,
            "tasks": [episode.task],
            "length": length,
            "seed": episode.seed,
            "behaviour": episode.behaviour,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + length,
        }
        columns, stats = self._vectors(episode, task), {}
        for name, values in columns.items():
            stats[name] = shaped(vector_statistics(values), self._features[name])
        arrays = {name: _column(values, self._features[name]) for name, values in columns.items()}
        for key in filter(is_image, episode.arrays):
            name, images = layout.feature_of(key), episode.arrays[key]
            if self._features[name]["dtype"] == "video":
                row |= self._video(name).write(images)
            else:
                arrays[name] = pa.array(image_column(episode.encoded.get(key) or encode_png(images)), _IMAGE_TYPE)
            histogram = image_histogram(images)
            self._histograms[name] = self._histograms.get(name, 0) + histogram
            stats[name] = histogram_statistics(histogram, length)
        stored = [name for name, feature in self._features.items() if feature["dtype"] != "video"]
        table = pa.table({name: arrays[name] for name in stored})
        table = table.replace_schema_metadata(layout.huggingface_metadata(self._features))
        row["data/chunk_index"], row["data/file_index"] = self._data.write(table)
        for name, values in statistics_to_json(stats).items():
            row |= {f"stats/{name}/{statistic}": value for statistic, value in values.items()}
        self._rows.append(row)
        self._episodes += 1
        self._frames += length
        if len(self._rows) == _ROWS_PER_WRITE:
            self._flush_rows()

    def _vectors(self, episode: Episode, task: int) -> dict[str, Array]:
        """All columns except images, by feature name."""
        length, frame = len(episode), np.arange(len(episode))
        columns = {
            layout.feature_of(key): array
            for key, array in episode.arrays.items()
            if key != "terminated" and not is_image(key)
        }
        if "terminated" in episode.arrays:
            done = frame == length - 1
            columns[layout.DONE] = done
            columns[layout.TRUNCATED] = done & ~episode.arrays["terminated"].astype(np.bool_)
        return columns | {
            "timestamp": (frame / float(self._rate)).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, self._episodes),
            "index": frame + self._frames,
            "task_index": np.full(length, task),
        }

    def _video(self, feature: str) -> VideoFiles:
        if feature not in self._videos:
            assert self._encoder is not None
            limit = self._limits["video_file_mb"] << 20
            self._videos[feature] = VideoFiles(self._partial, feature, self._encoder, self._rate, limit)
        return self._videos[feature]

    def _flush_rows(self) -> None:
        if self._rows:
            self._metadata.write(pa.Table.from_pylist(self._rows), location_prefix="meta/episodes/")
            self._rows = []

    def _write_meta(self) -> None:
        counts = {"episodes": self._episodes, "frames": self._frames, "tasks": len(self._tasks)}
        info = layout.dataset_info(self._features, self._rate, **counts, **self._limits)
        write_tasks(self._partial, self._tasks)
        stats = json.dumps(statistics_to_json(self._statistics()), indent=4, allow_nan=False)
        (self._partial / layout.STATS).write_text(stats, encoding="utf-8")
        (self._partial / layout.INFO).write_text(json.dumps(info, indent=4), encoding="utf-8")

    def _statistics(self) -> dict[str, Statistics]:
        """Exact statistics over all frames; vectors are read back by column to save memory."""
        statistics: dict[str, Statistics] = {}
        for name, feature in self._features.items():
            if name in self._histograms:
                statistics[name] = histogram_statistics(self._histograms[name], self._frames)
            else:
                statistics[name] = column_statistics(self._partial, name, feature)
        return statistics

    @contextmanager
    def _cleanup_on_error(self) -> Iterator[None]:
        """Delete partial files on failure and convert errors of file system and encoders to a `UserError`."""
        try:
            yield
        except (OSError, pa.ArrowException, av.FFmpegError) as error:
            self.abort()
            raise cannot_write(self.path, error) from error
        except BaseException:
            self.abort()
            raise


class ParquetFiles:
    """Tables appended to a sequence of parquet files, each below a size (before compression)."""

    def __init__(self, root: Path, template: str, max_bytes: int) -> None:
        self._root, self._template, self._max_bytes = root, template, max_bytes
        self._location = (0, 0)
        self._bytes = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table, location_prefix: str = "") -> tuple[int, int]:
        """Append one row group; return chunk and file index, added as columns if a prefix is given."""
        if self._bytes and self._bytes + table.nbytes > self._max_bytes:
            self.close()
            self._location, self._bytes = layout.next_file(*self._location), 0
        chunk, file = self._location
        if location_prefix:
            for name, index in (("chunk_index", chunk), ("file_index", file)):
                table = table.append_column(location_prefix + name, pa.array([index] * len(table), pa.int64()))
        if self._writer is None:
            path = self._root / self._template.format(chunk_index=chunk, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, table.schema, compression="snappy")
        self._writer.write_table(table)
        self._bytes += table.nbytes
        return self._location

    def close(self) -> None:
        """Finish the current file; safe to call twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            finally:
                writer.is_open = False  # its finalizer would try again and print a traceback, e.g. on a full disk


def write_tasks(root: Path, tasks: Mapping[str, int]) -> None:
    """Write `meta/tasks.parquet` of `{task: index}`."""
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    pq.write_table(table.replace_schema_metadata(layout.pandas_index_metadata()), root / layout.TASKS)


def column_statistics(root: Path, name: str, feature: Mapping[str, Any]) -> Statistics:
    """Exact statistics of a column of numbers over all data files of a dataset."""
    files = sorted((root / "data").glob("*/*.parquet"))
    parts = [pq.read_table(file, columns=[name]).column(0).combine_chunks() for file in files]
    values = np.concatenate([_flattened(part).to_numpy(zero_copy_only=False) for part in parts])
    return shaped(vector_statistics(values.reshape(-1, *feature["shape"])), feature)


def write_lerobot(episodes: Episodes, path: str | Path, *, video: bool = True, overwrite: bool = False) -> None:
    """Write `episodes` as a LeRobotDataset."""
    options = {"video": video, "overwrite": overwrite, "names": episodes.names}
    options["action_type"] = episodes.action_type
    with LeRobotWriter(path, control_dt=episodes.control_dt, **options) as writer:
        for index in range(episodes.num_episodes):
            writer.add(episodes.episode(index))


def _column(values: Array, feature: Mapping[str, Any]) -> pa.Array:
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    if feature["shape"] == [1]:
        return column
    for width in reversed(feature["shape"]):
        column = pa.FixedSizeListArray.from_arrays(column, width)
    return column


def _flattened(column: pa.Array) -> pa.Array:
    while pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    return column


def shaped(statistics: Statistics, feature: Mapping[str, Any]) -> Statistics:
    """Statistics in the shape of the feature, as LeRobot expects them."""
    shape = feature["shape"]
    return {name: value if name == "count" else value.reshape(shape) for name, value in statistics.items()}
