"""Datasets made of episodes of other datasets: chosen or joined, with other keys, names or instructions.

Nothing is decoded or encoded: numbers and embedded images are copied as they are stored, and video files whole. A video
file keeps the frames of episodes that are not copied, to which no episode refers; a file of such episodes alone is left
out. `meta/provenance.json` names the sources.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from robopolicy.atomic import FolderWriter
from robopolicy.data.formats.lerobot import layout
from robopolicy.data.formats.lerobot.layout import reading
from robopolicy.data.formats.lerobot.reader import DatasetFiles, EpisodeFiles, column_numbers
from robopolicy.data.formats.lerobot.writer import ParquetFiles, column_statistics, shaped, write_tasks
from robopolicy.data.statistics import Statistics, combine_statistics, statistics_to_json, vector_statistics
from robopolicy.errors import UserError, cannot_write, unknown_name
from robopolicy.files import check_new_folder, parse_json
from robopolicy.plurals import counted
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX, STEP_KEYS
from robopolicy.versions import sha256, versions

PROVENANCE = "meta/provenance.json"
REQUIRED = ("action", *layout.INDEX_FEATURES)  # features that every dataset has
ACTIONS = ("action", "executed", "policy_action")  # keys with the shape of actions; the other `STEP_KEYS` are numbers


@dataclass(frozen=True)
class Edit:
    """Changes of a copy; keys name entries of episodes, e.g. `state` or `image.front`, or features of LeRobot."""

    rename: Mapping[str, str] = field(default_factory=dict[str, str])  # key -> new key
    remove: tuple[str, ...] = ()  # keys
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # key -> names of entries
    instruction: str | None = None  # of all episodes

    def apply(self, source: DatasetFiles) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the features of a copy: `{feature of the source: (new feature, its description)}`.

        Raises:
            UserError: A key is unknown, required or taken, or the names do not fit.
        """
        removed = {_feature(key, source) for key in self.remove}
        renamed = {_feature(key, source): _new_feature(key, new, source) for key, new in self.rename.items()}
        named = {_feature(key, source): names for key, names in self.names.items()}
        for feature in removed | renamed.keys():
            if feature in REQUIRED:
                raise UserError(f"Every dataset needs '{feature}', so it cannot be removed or renamed.")
        kept = {name: dict(feature) for name, feature in source.features.items() if name not in removed}
        result = {name: (renamed.get(name, name), feature) for name, feature in kept.items()}
        for feature, names in named.items():
            if feature not in kept or list(kept[feature]["shape"]) != [len(names)]:
                found = kept.get(feature, {}).get("shape", "no longer there")
                raise UserError(f"{len(names)} names do not fit '{feature}', which is {found}.")
            if repeated := next((name for name in names if not name or names.count(name) > 1), None):
                raise UserError(f"The entries of '{feature}' need different names, and '{repeated}' is given twice.")
            kept[feature]["names"] = list(names)
        new = [name for name, _ in result.values()]
        if twice := next((name for name in new if new.count(name) > 1), ""):
            raise UserError(f"The copy would have '{twice}' twice; remove one of them by --remove.")
        return result


class EpisodeCopier:
    """Context manager that writes a dataset of copied episodes; it appears at `path` when the context ends.

    with EpisodeCopier("data/both") as copier:
        copier.add("data/first")
        copier.add("data/second", range(10))
    """

    def __init__(
        self, path: str | Path, *, edit: Edit | None = None, overwrite: bool = False, command: str = ""
    ) -> None:
        """Prepare `path`; an existing path raises a UserError unless `overwrite` is set and it is a dataset.

        Args:
            path: Folder to create.
            edit: Changes of all episodes.
            overwrite: Replace an existing dataset, but no source, once the new one is complete.
            command: Command for the provenance.
        """
        self.path, self.edit, self.command = Path(path).absolute(), edit or Edit(), command
        self.frames = 0
        self.unused_frames = 0  # of episodes that were not copied, in the copied video files
        self._overwrite = overwrite
        self._first: DatasetFiles | None = None
        self._features: dict[str, dict[str, Any]] = {}
        self._schema: pa.Schema | None = None
        self._tasks: dict[str, int] = {}
        self._rows: list[tuple[dict[str, Any], dict[str, Statistics]]] = []  # row and statistics of every episode
        self._files: dict[tuple[str, Path], tuple[int, int]] = {}  # (feature, source) -> place of the copied video
        self._sources: list[dict[str, Any]] = []
        check_new_folder(self.path, "a dataset", layout.INFO, overwrite=overwrite)
        try:
            self._folder = FolderWriter(self.path)
            (self._folder.folder / "meta").mkdir()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._data = ParquetFiles(self._folder.folder, layout.DATA, layout.DATA_FILE_MB << 20)
        self._metadata = ParquetFiles(self._folder.folder, layout.EPISODES, layout.DATA_FILE_MB << 20)
        self._complete = False  # all files are written

    @property
    def episodes(self) -> int:
        """Number of episodes copied so far."""
        return len(self._rows)

    @property
    def videos(self) -> int:
        """Number of video files copied so far."""
        return len(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, path: str | Path, episodes: Sequence[int] | None = None) -> None:
        """Copy all episodes of the dataset at `path`, or those with the given numbers, counted from 0.

        Raises:
            UserError: The dataset is damaged, lacks an episode, or differs from the first one in rate or features.
        """
        check_new_folder(self.path, "a dataset", layout.INFO, overwrite=self._overwrite, sources=[Path(path)])
        source = DatasetFiles.open(path)
        rows = present = source.rows(None)
        if episodes is not None:
            if missing := sorted(set(episodes) - set(range(len(rows)))):
                raise UserError(
                    f"{path} has {counted(len(rows), 'episode')}, numbered from 0; episode {missing[0]} is missing."
                )
            rows = [rows[number] for number in sorted(set(episodes))]
        features = self.edit.apply(source)
        self._check_features(source, dict(features.values()))
        with self._cleanup_on_error():
            self._copy(source, rows, features)
        self.unused_frames += _unused_frames(present, rows)
        self._sources.append(_provenance(source, None if episodes is None else sorted(set(episodes))))

    def complete(self) -> None:
        """Write the last files of the dataset, which does not appear yet."""
        if self._first is None or not self.episodes:
            self.abort()
            raise UserError(f"No episode was chosen, so {self.path} was not written.")
        with self._cleanup_on_error():
            self._data.close()
            self._write_meta(self._first)
        self._complete = True

    def close(self) -> None:
        """Complete the dataset and move it to its path."""
        if not self._complete:
            self.complete()
        with self._cleanup_on_error():
            # Another process may have created it meanwhile.
            check_new_folder(self.path, "a dataset", layout.INFO, overwrite=self._overwrite)
            self._folder.publish()

    def abort(self) -> None:
        """Remove everything written so far."""
        for part in (self._data, self._metadata):
            with suppress(OSError, pa.ArrowException):  # the files are deleted anyway
                part.close()
        self._folder.discard()

    def _check_features(self, source: DatasetFiles, features: dict[str, dict[str, Any]]) -> None:
        """Compare the rate and the features of a source with the first one."""
        if self._first is None:
            self._first, self._features = source, features
            return
        first = self._first
        if source.rate != first.rate:
            ours, theirs = (f"{each.root} has {float(each.rate):g}" for each in (first, source))
            raise UserError(f"{ours} frames per second and {theirs}; only datasets of one rate can be merged.")
        for name in sorted(features.keys() ^ self._features.keys()):
            lacking, other = (source, first) if name in self._features else (first, source)
            raise UserError(f"{lacking.root} lacks '{name}' of {other.root}; remove or rename it there first.")
        types = [layout.action_type_of(each["action"]) for each in (features, self._features)]
        if all(types) and types[0] != types[1]:
            raise UserError(f"Actions are {types[0]} in {source.root} and {types[1]} in {first.root}.")
        for name in features:
            for entry in ("dtype", "shape", "names"):
                ours, theirs = (each[name].get(entry) for each in (self._features, features))
                if ours != theirs and (entry != "names" or (ours and theirs)):
                    raise UserError(f"'{name}' has {entry} {theirs} in {source.root} and {ours} in {first.root}.")

    def _copy(
        self,
        source: DatasetFiles,
        rows: Sequence[EpisodeFiles],
        features: Mapping[str, tuple[str, dict[str, Any]]],
    ) -> None:
        stored = [name for name, (_, feature) in features.items() if feature["dtype"] != "video"]
        tasks, cameras = source.tasks(), source.camera_statistics()
        for _, group in groupby(rows, key=lambda row: row.data):
            chosen, offset = list(group), 0
            frames = source.frames(chosen, stored)
            for row in chosen:
                table = frames.slice(offset, row.length)
                offset += row.length
                with reading(source.root):
                    texts = [tasks.get(int(index), "") for index in table["task_index"].to_numpy()]
                    texts = texts if self.edit.instruction is None else [self.edit.instruction] * row.length
                    table, stats = self._renumber(table, texts, features)
                entry = self._episode_row(row, list(dict.fromkeys(texts)))
                entry["data/chunk_index"], entry["data/file_index"] = self._data.write(table)
                for name, (new, feature) in features.items():
                    if feature["dtype"] == "video":
                        entry |= self._copy_video(new, *row.videos[name], length=row.length, source=source)
                    if known := cameras.get(row.index, {}).get(name):
                        stats[new] = known
                self._rows.append((entry, stats))
                self.frames += row.length

    def _renumber(
        self, table: pa.Table, texts: Sequence[str], features: Mapping[str, tuple[str, dict[str, Any]]]
    ) -> tuple[pa.Table, dict[str, Statistics]]:
        """Return the frames of an episode under their new names and numbers, and the statistics of its numbers."""
        task = [self._tasks.setdefault(text, len(self._tasks)) for text in texts]
        counted = {
            "episode_index": np.full(len(table), self.episodes),
            "index": np.arange(len(table)) + self.frames,
            "task_index": np.array(task),
        }
        columns: dict[str, Any] = {}
        stats: dict[str, Statistics] = {}
        for name, (new, feature) in features.items():
            if feature["dtype"] == "video":
                continue
            columns[new] = pa.chunked_array([pa.array(counted[name])]) if name in counted else table[name]
            if feature["dtype"] not in ("image", "string"):
                values = column_numbers(name, columns[new], feature["shape"])
                stats[new] = shaped(vector_statistics(values), feature)
        copied = pa.table(columns).replace_schema_metadata(layout.huggingface_metadata(self._features))
        schema: pa.Schema = self._schema or copied.schema
        self._schema = schema
        return copied.select(schema.names).cast(schema), stats

    def _episode_row(self, row: EpisodeFiles, texts: list[str]) -> dict[str, Any]:
        return {
            "episode_index": self.episodes,
            "tasks": texts,
            "length": row.length,
            "seed": row.seed,
            "behaviour": row.behaviour,
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + row.length,
        }

    def _copy_video(
        self, feature: str, file: Path, start: float, *, length: int, source: DatasetFiles
    ) -> dict[str, Any]:
        """Copy a video file that was not copied yet; return the row of an episode in it."""
        if (feature, file) not in self._files:
            places = [place for (name, _), place in self._files.items() if name == feature]
            place = layout.next_file(*places[-1]) if places else (0, 0)
            root = self._folder.folder
            target = root / layout.VIDEO.format(video_key=feature, chunk_index=place[0], file_index=place[1])
            if not target.resolve().is_relative_to(root.resolve()):
                raise UserError(f"The videos of '{feature}' would lie outside of {self.path}.")
            target.parent.mkdir(parents=True, exist_ok=True)
            with reading(file), file.open("rb"):
                pass
            shutil.copyfile(file, target)  # an error is one of the target, e.g. a full disk
            self._files[feature, file] = place
        chunk, number = self._files[feature, file]
        row = {"chunk_index": chunk, "file_index": number, "from_timestamp": start}
        row["to_timestamp"] = start + float(length / source.rate)
        return {f"videos/{feature}/{name}": value for name, value in row.items()}

    def _write_meta(self, first: DatasetFiles) -> None:
        root = self._folder.folder
        info = layout.dataset_info(
            self._features, first.rate, episodes=self.episodes, frames=self.frames, tasks=len(self._tasks)
        )
        robot = first.info.get("robot_type")
        info["robot_type"] = robot if isinstance(robot, str) else None
        write_tasks(root, self._tasks)
        parts = {name: [stats[name] for _, stats in self._rows if name in stats] for name in self._features}
        complete = [name for name, found in parts.items() if len(found) == self.episodes]
        rows = [
            entry | {f"stats/{name}/{key}": value for name, found in values.items() for key, value in found.items()}
            for entry, stats in self._rows
            for values in [statistics_to_json({name: stats[name] for name in complete})]
        ]
        self._metadata.write(pa.Table.from_pylist(rows), location_prefix="meta/episodes/")
        self._metadata.close()
        cameras = ("image", "video")
        stats = {
            name: combine_statistics(parts[name])
            if self._features[name]["dtype"] in cameras
            else column_statistics(root, name, self._features[name])
            for name in complete
        }
        for name, content in (
            (layout.STATS, statistics_to_json(stats)),
            (PROVENANCE, self._provenance()),
            (layout.INFO, info),
        ):
            (root / name).write_text(json.dumps(content, indent=4, allow_nan=False), encoding="utf-8")

    def _provenance(self) -> dict[str, Any]:
        edit = {name: value for name, value in asdict(self.edit).items() if value}
        return {"command": self.command, "edit": edit, "sources": self._sources, "versions": versions()}

    @contextmanager
    def _cleanup_on_error(self) -> Iterator[None]:
        """Delete partial files on failure and convert errors of the file system to a `UserError`."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            self.abort()
            raise cannot_write(self.path, error) from error
        except BaseException:
            self.abort()
            raise


def describe_copy(copier: EpisodeCopier, path: Path) -> str:
    """Format the size of a written dataset."""
    content = f"{counted(copier.episodes, 'episode')} ({counted(copier.frames, 'frame')})"
    unused = f" with {counted(copier.unused_frames, 'frame')} of other episodes" if copier.unused_frames else ""
    return f"{path}: {content}, {counted(copier.videos, 'video file')}{unused}"


def _unused_frames(present: Sequence[EpisodeFiles], copied: Sequence[EpisodeFiles]) -> int:
    """Frames of the episodes that are not copied, in the video files of those that are."""
    files = {file for row in copied for file, _ in row.videos.values()}
    numbers = {row.index for row in copied}
    others = [row for row in present if row.index not in numbers]
    return sum(row.length for row in others for file, _ in row.videos.values() if file in files)


def _provenance(source: DatasetFiles, episodes: Sequence[int] | None) -> dict[str, Any]:
    """Origin of copied episodes: the dataset, the hash of its description, the episodes, and its own origin."""
    earlier = source.root / PROVENANCE
    entry: dict[str, Any] = {"path": str(source.root), "info_sha256": sha256(source.root / layout.INFO)}
    entry["episodes"] = "all" if episodes is None else list(episodes)
    if earlier.is_file():
        with reading(earlier):
            entry["provenance"] = parse_json(earlier.read_text(encoding="utf-8"))
    return entry


def _feature(key: str, source: DatasetFiles) -> str:
    """Feature of an episode key, or of LeRobot's own name for it."""
    known = {layout.key_of(name, camera=name in source.cameras) or name: name for name in source.features}
    if key in source.features:
        return key
    if key not in known:
        raise unknown_name("key", key, known, f"of {source.root}")
    return known[key]


def _new_feature(key: str, new: str, source: DatasetFiles) -> str:
    feature = layout.feature_of(new)
    shape = source.features[_feature(key, source)]["shape"]
    expected = source.features["action"]["shape"] if new in ACTIONS else [1]
    if new == HIDDEN_STATE or (new in STEP_KEYS and list(shape) != list(expected)):
        raise UserError(f"'{new}' is a key with a meaning of its own, which '{key}' does not have; choose another one.")
    if (_feature(key, source) in source.cameras) != feature.startswith(layout.IMAGES):
        raise UserError(f"A key begins with '{IMAGE_PREFIX}' exactly if it is a camera; '{new}' does not fit '{key}'.")
    return feature
