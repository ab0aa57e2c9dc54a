"""Replay buffers of Diffusion Policy (Chi et al. 2023) in zarr: a folder, or a zip file as of UMI (Chi et al. 2024).

    meta/episode_ends (E,)  one past the last frame of each episode
    data/<key> (F, ...)     images as (F, height, width, 3), one chunk per frame

Stores of formats 2 and 3 are read, and format 2 is written, which the zarr 2 of Diffusion Policy reads. Codecs are
compared with a list before anything is decoded, since one of numcodecs unpickles. Consolidated metadata are ignored,
since they may describe an array differently.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.archives import DATASET_BYTES, DEFLATE_RATIO, open_zip
from robopolicy.atomic import atomic_file, atomic_folder, scratch_folder
from robopolicy.data.episodes import Episode
from robopolicy.data.formats.flat import ENDS, FlatReader
from robopolicy.data.formats.foreign import MAX_TEXT, check_real, check_size, foreign_errors, json_object
from robopolicy.data.formats.mapping import DatasetMapping
from robopolicy.data.formats.stored_facts import NAME, FactsOfEpisodes, stored_images
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.spec import IMAGE_PREFIX

CODECS = {
    *("blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "lzma", "delta", "shuffle", "crc32c", "bytes", "transpose"),
    "sharding_indexed",
}
IMAGE_CODECS = {
    f"imagecodecs_{name}" for name in ("jpegxl", "jpeg2k", "jpegxr", "jpegls", "png", "jpeg", "webp", "avif")
}
_METADATA = {".zarray": 2, ".zattrs": 2, ".zgroup": 2, "zarr.json": 3}  # file: format
_CHUNK_BYTES = 2**20  # of vectors in one chunk


class _Files:
    """Names and sizes of the files of a store, in a folder or a zip file."""

    def __init__(self, path: Path) -> None:
        self._path, self.sizes = path, dict[str, int]()
        self._zip = path.is_file()
        if self._zip:
            with open_zip(path, DATASET_BYTES, DEFLATE_RATIO) as archive:
                self.sizes = {member.filename: member.file_size for member in archive.infolist()}
            return
        root = os.path.realpath(path)
        for folder, folders, names in os.walk(path):
            for name in (*folders, *names):
                place = os.path.join(folder, name)
                if os.path.islink(place) and not os.path.realpath(place).startswith(root + os.sep):
                    raise UserError(f"'{os.path.relpath(place, path)}' links to a place outside of the store.")
            for name in names:
                place = os.path.join(folder, name)
                self.sizes[os.path.relpath(place, path).replace(os.sep, "/")] = os.stat(place).st_size

    def json(self, name: str) -> dict[str, Any]:
        """Content of a JSON file."""
        if self.sizes[name] > MAX_TEXT:
            raise UserError(f"'{name}' has {self.sizes[name]} bytes.")
        if not self._zip:
            return json_object((self._path / name).read_bytes(), f"'{name}'")
        with open_zip(self._path, DATASET_BYTES, DEFLATE_RATIO) as archive:
            return json_object(archive.read(name), f"'{name}'")

    def arrays(self) -> dict[str, dict[str, Any]]:
        """Descriptions of all arrays by their names; raises a `UserError` for metadata of two formats."""
        found: dict[str, dict[str, Any]] = {}
        if len(formats := self.formats()) > 1:
            raise UserError(
                f"It has metadata of formats 2 and 3, '{formats[2]}' and '{formats[3]}'; remove one format."
            )
        for name in self.sizes:
            folder, _, file = name.rpartition("/")
            if file in _METADATA:
                entry = self.json(name)
                if file == ".zarray" or entry.get("node_type") == "array":
                    found[folder] = entry
        return found

    def formats(self) -> dict[int, str]:
        """One file of the metadata of each format that occurs."""
        names = {name.rpartition("/")[2]: name for name in self.sizes}
        return {format: names[file] for file, format in _METADATA.items() if file in names}

    def chunks(self, name: str) -> int:
        """Number of chunks that an array has on disk."""
        return sum(file.startswith(f"{name}/") and not file.endswith(tuple(_METADATA)) for file in self.sizes)


def open_zarr(path: Path, mapping: DatasetMapping) -> FlatReader:
    """Open a store; raises a `UserError` if it is damaged, or needs a codec that is unknown or not installed."""
    zarr = require("zarr", "zarr")
    if not path.exists():
        raise UserError(f"No dataset at {path}.")
    with foreign_errors(path):
        files = _Files(path)
        described = files.arrays()
        for name, entry in described.items():
            _check_array(name, entry, sum(files.sizes.values()))
        if f"meta/{ENDS}" not in described:
            raise UserError(f"It has no array 'meta/{ENDS}'; it has {', '.join(described) or 'no arrays'}.")
        store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else path
        root = zarr.open_group(store, mode="r", zarr_format=min(files.formats()), use_consolidated=False)
        names = [name.removeprefix("data/") for name in described if name.startswith("data/")]
        if not names:
            raise UserError("It has no arrays in 'data'.")
        arrays = {name: root[f"data/{name}"] for name in sorted(names)}
        for name, array in arrays.items():
            check_real(name, array.dtype)
        check_real(ENDS, root[f"meta/{ENDS}"].dtype)
        ends = np.asarray(root[f"meta/{ENDS}"][:])
        facts = root.attrs.get(NAME)
        facts = json_object(facts, NAME) if isinstance(facts, str) else {}
        reader = FlatReader("zarr", arrays, ends, facts=facts, close=getattr(store, "close", None))
        reader.notes = tuple(_absent_chunks(name, described[f"data/{name}"], files) for name in names)
        reader.notes = tuple(filter(None, reader.notes))
    return reader


def write_zarr(path: Path, episodes: Iterable[Episode], facts: FactsOfEpisodes) -> None:
    """Write episodes as a replay buffer: a folder, or a zip file if the name ends in `.zip`."""
    if path.suffix != ".zip":
        with atomic_folder(path) as folder:
            _fill(folder, episodes, facts)
        return
    with atomic_file(path) as packed, scratch_folder(path) as folder:
        _fill(folder, episodes, facts)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for file in sorted(each for each in folder.rglob("*") if each.is_file()):
                archive.write(file, file.relative_to(folder))


def _fill(folder: Path, episodes: Iterable[Episode], facts: FactsOfEpisodes) -> None:
    zarr, numcodecs = require("zarr", "zarr"), require("numcodecs", "zarr")
    root = zarr.open_group(folder, mode="w", zarr_format=2)
    ends, arrays = list[int](), dict[str, Any]()
    for episode in episodes:
        for key, values in episode.arrays.items():
            name, rows = key.removeprefix(IMAGE_PREFIX), stored_images(key, values)
            if name not in arrays:
                frames = 1 if key.startswith(IMAGE_PREFIX) else max(1, _CHUNK_BYTES // max(1, rows[0].nbytes))
                arrays[name] = root.create_array(
                    f"data/{name}",
                    shape=(0, *rows.shape[1:]),
                    chunks=(frames, *rows.shape[1:]),
                    dtype=rows.dtype,
                    compressors=numcodecs.Blosc("lz4", 5, numcodecs.Blosc.NOSHUFFLE),
                    config={"write_empty_chunks": True},  # an absent chunk is damage
                )
            arrays[name].append(rows)
        ends.append((ends[-1] if ends else 0) + len(episode))
        facts.add(episode)
    root.attrs[NAME] = facts.to_json()
    root.create_array(f"meta/{ENDS}", data=np.array(ends, np.int64), compressors=None)


def _check_array(name: str, entry: Mapping[str, Any], available: int) -> None:
    """Check the description of an array before zarr acts on it."""
    shape = entry.get("shape")
    grid = entry.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, Mapping) else None
    chunks = configuration.get("chunk_shape") if isinstance(configuration, Mapping) else entry.get("chunks")
    for sizes in (shape, chunks):
        if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
            raise UserError(f"The shape of '{name}' and of its chunks must be whole numbers.")
        check_size(name, math.prod(sizes), available)
    for codec in _codecs(entry):
        if codec in IMAGE_CODECS:
            require("imagecodecs.numcodecs", "zarr-images").register_codecs(codec, verbose=False)
        elif codec.removeprefix("numcodecs.") not in CODECS:
            raise UserError(
                f"'{name}' is compressed by '{codec}', which is not read; known: {', '.join(sorted(CODECS))}."
            )


def _codecs(entry: Mapping[str, Any]) -> list[str]:
    """Names of the codecs of an array, in either format."""
    nested = entry.get("codecs") or []
    found = [entry.get("compressor"), *(entry.get("filters") or []), *nested]
    names: list[str] = []
    for codec in filter(None, found):
        if not isinstance(codec, Mapping):
            raise UserError(f"A codec must be an object, found {codec!r}.")
        names.append(str(codec.get("id", codec.get("name"))))
        inner = codec.get("configuration")
        if isinstance(inner, Mapping):  # of shards
            names += _codecs({"codecs": [*(inner.get("codecs") or []), *(inner.get("index_codecs") or [])]})
    return names


def _absent_chunks(name: str, entry: Mapping[str, Any], files: _Files) -> str:
    """Note about chunks that are not on disk, which count as the fill value; some writers leave out zeros."""
    grid = entry.get("chunk_grid")
    chunks = grid["configuration"]["chunk_shape"] if grid else entry["chunks"]
    expected = math.prod(-(-size // max(1, chunk)) for size, chunk in zip(entry["shape"], chunks, strict=True))
    found = files.chunks(f"data/{name}")
    return (
        f"{expected - found} of {expected} chunks of '{name}' are absent and count as zero" if found < expected else ""
    )
