"""Arrays of the episodes of a Minari dataset, in one HDF5 file or in Arrow or Parquet files."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from robopolicy.data.episodes import Array
from robopolicy.data.formats.foreign import MAX_TEXT, json_object
from robopolicy.data.formats.hdf5 import Hdf5File
from robopolicy.errors import UserError

_ARROW = b"ARROW1"  # beginning of a file; streams have none
_PARTS = (".arrow", ".parquet")


class EpisodeStorage(ABC):
    """Arrays of the episodes of a dataset."""

    count: int  # episodes

    @abstractmethod
    def arrays(self, episode: int) -> tuple[str, ...]:
        """Names of the arrays of an episode, such as `observations/state`."""

    @abstractmethod
    def read(self, episode: int, name: str) -> Array | list[bytes]:
        """Return an array, or the bytes of images."""

    @abstractmethod
    def seed(self, episode: int) -> int:
        """Return the seed of an episode; -1 if none is stored."""

    def close(self) -> None:
        """Close the files."""


class Hdf5Storage(EpisodeStorage):
    """Episodes in `main_data.hdf5`."""

    def __init__(self, path: Path) -> None:
        self._file = Hdf5File(path)
        try:
            names = [name for name in self._file.root if re.fullmatch(r"episode_\d{1,18}", name)]
            names.sort(key=lambda name: int(name.removeprefix("episode_")))
            self._groups = [self._file.group(self._file.root, name) for name in names]
        except BaseException:
            self._file.close()
            raise
        self.count = len(self._groups)

    def arrays(self, episode: int) -> tuple[str, ...]:
        """Names of the arrays of an episode."""
        return tuple(name for name, _ in self._file.arrays(self._groups[episode]))

    def read(self, episode: int, name: str) -> Array | list[bytes]:
        """Return an array, or the bytes of images."""
        return self._file.read(self._file.child(self._groups[episode], name))

    def seed(self, episode: int) -> int:
        """Return the seed of an episode; -1 if none is stored."""
        return checked_seed(self._groups[episode].attrs.get("seed"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ArrowStorage(EpisodeStorage):
    """Episodes in folders `<episode>/part-<k>.arrow` or `.parquet`.

    Args:
        folder: Folder of the episodes.
        shapes: Shapes of the rows of arrays, which Arrow stores flattened.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        names = sorted((each.name for each in folder.iterdir() if re.fullmatch(r"\d{1,18}", each.name)), key=int)
        self._folders, self._shapes = [folder / name for name in names], shapes
        self.count = len(names)
        self._batch = lru_cache(maxsize=1)(self._load)

    def arrays(self, episode: int) -> tuple[str, ...]:
        """Names of the arrays of an episode."""
        return tuple(self._batch(episode))

    def read(self, episode: int, name: str) -> Array | list[bytes]:
        """Return an array, or the bytes of images; Minari pads all columns to the length of the observations."""
        column = self._batch(episode)[name]
        if not name.startswith(("observations", "infos")):
            column = column.slice(0, len(column) - 1)
        if column.null_count:
            raise UserError(f"'{name}' of episode {episode} has rows without values.")
        kind = column.type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return column.to_pylist()
        width: tuple[int, ...] = ()
        if pa.types.is_fixed_size_list(kind):
            width, column = (kind.list_size,), column.flatten()
        if column.null_count or not (pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type)):
            raise UserError(f"'{name}' of episode {episode} holds {kind}, expected rows of equally many numbers.")
        values = column.to_numpy(zero_copy_only=False)
        return values.reshape(-1, *self._shapes.get(name, width)) if width else values

    def seed(self, episode: int) -> int:
        """Return the seed of an episode; -1 if none is stored."""
        path = self._folders[episode] / "metadata.json"
        if not path.is_file() or path.stat().st_size > MAX_TEXT:
            return -1
        return checked_seed(json_object(path.read_bytes(), f"{path.parent.name}/{path.name}").get("seed"))

    def _load(self, episode: int) -> dict[str, Any]:
        """Columns of an episode by name, structures split into their fields."""
        folder = self._folders[episode]
        parts = sorted(each for each in folder.iterdir() if each.suffix in _PARTS)
        if not parts:
            raise UserError(f"Episode {folder.name} has no file part-0.arrow or part-0.parquet.")
        table = pa.concat_tables([_read_part(part) for part in parts]).combine_chunks()
        if not len(table):
            raise UserError(f"Episode {folder.name} has no rows.")
        found: dict[str, Any] = {}
        for name in table.column_names:
            found |= _columns(name, table[name].combine_chunks())
        found.pop("episode_id", None)
        return found


def checked_seed(value: Any) -> int:
    """Seed of an episode as an integer; -1 if `value` is none."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
    return int(value) if whole and 0 <= value < 2**63 else -1


def _read_part(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.OSFile(str(path)) as file:
        is_file = file.read(len(_ARROW)) == _ARROW
        file.seek(0)
        table = (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()
    table.validate(full=True)
    return table


def _columns(name: str, column: Any) -> dict[str, Any]:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if not pa.types.is_struct(column.type):
        return {name: column}
    found: dict[str, Any] = {}
    for field, inner in zip(column.type, column.flatten(), strict=True):
        found |= _columns(f"{name}/{field.name}", inner)
    return found
