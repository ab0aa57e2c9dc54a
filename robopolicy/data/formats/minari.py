"""Datasets of Minari (Younis et al. 2024) in HDF5, Arrow or Parquet, read and written without its package.

    <name>-v<N>/data/metadata.json
    <name>-v<N>/data/main_data.hdf5                           groups episode_<i>
    <name>-v<N>/data/<episode>/{metadata.json, part-0.arrow}  or .parquet

An episode has T actions, rewards, `terminations` and `truncations`, and T + 1 `observations`: an array, or one array
per key of a dictionary. Images may be JPEG bytes, whatever `jpeg_encoding` in the metadata states.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.atomic import atomic_folder
from robopolicy.data.episodes import Array, Episode
from robopolicy.data.formats.foreign import MAX_TEXT, find_text, foreign_errors, json_object
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.minari_storage import ArrowStorage, EpisodeStorage, Hdf5Storage
from robopolicy.data.formats.reader import DatasetReader, default_key
from robopolicy.data.formats.stored_facts import NAME, FactsOfEpisodes, StoredFacts, stored_images
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.spec import IMAGE_PREFIX, STEP_KEYS

METADATA, MAIN = "metadata.json", "main_data.hdf5"
_KEYS = {"actions": "action", "rewards": "reward", "terminations": "terminated", "infos/success": "success"}
_STORED = {key: name for name, key in _KEYS.items()}
_REQUIRED = {
    "closing": "the observation after the last action (read a source that has it with --closing)",
    "reward": "rewards",
    "terminated": "terminations",
}
_DATASET_NAME = re.compile(r"[\w.-]+-v\d+")


class MinariReader(DatasetReader):
    """Reader of one dataset, in the folder `<name>-v<N>` or its folder `data`."""

    format = "minari"

    def __init__(self, path: Path, mapping: DatasetMapping) -> None:
        folder = path if (path / METADATA).is_file() else path / "data"
        if not (folder / METADATA).is_file():
            raise UserError(f"No Minari dataset at {path}: data/{METADATA} is missing.")
        with foreign_errors(path):
            if (folder / METADATA).stat().st_size > MAX_TEXT:
                raise UserError(f"{METADATA} has more than {MAX_TEXT} bytes.")
            facts = json_object((folder / METADATA).read_bytes(), METADATA)
            main = folder / MAIN
            self._storage: EpisodeStorage = (
                Hdf5Storage(main) if main.is_file() else ArrowStorage(folder, _shapes(facts))
            )
        try:
            with foreign_errors(path):
                self._open(facts)
        except BaseException:
            self.close()
            raise

    def _open(self, facts: Mapping[str, Any]) -> None:
        storage = self._storage
        if not storage.count:
            raise UserError("It contains no episodes.")
        arrays = storage.arrays(0)
        for index in range(storage.count):
            if found := set(arrays) ^ set(storage.arrays(index)):
                raise UserError(f"Episodes differ: '{min(found)}' is not in both episodes 0 and {index}.")
        for name in ("observations", "actions", "rewards"):
            if not any(array.split("/")[0] == name for array in arrays):
                raise UserError(f"It has no '{name}'; it has {', '.join(arrays) or 'no arrays'}.")
        self.keys = {name: self._key(name) for name in arrays if name in _KEYS or name.startswith("observations")}
        self.others = tuple(name for name in arrays if name not in self.keys)
        own = facts.get(NAME)
        stored = StoredFacts.from_dict(json_object(own, NAME) if isinstance(own, str) else {}, storage.count)
        self.names, self.action_type = stored.names, stored.action_type
        if stored.control_dt:
            self.rate, self.rate_origin = 1 / stored.control_dt, f"entry {NAME} of {METADATA}"
        spec = facts.get("env_spec")
        task = find_text(json_object(spec, "env_spec"), "id") if isinstance(spec, str) else ""
        self.episodes = [
            stored.info(index, f"episode_{index}", len(storage.read(index, "rewards")), task, storage.seed(index))
            for index in range(storage.count)
        ]

    def close(self) -> None:
        """Close the files."""
        self._storage.close()

    def read(self, episode: int, name: str, feature: FeatureMapping) -> Array | list[bytes]:
        """Read an array; of information about T + 1 observations, the rows after the actions."""
        values = self._storage.read(episode, name)
        return values[1:] if name in _KEYS and len(values) == self.episodes[episode].length + 1 else values

    def _key(self, name: str) -> str:
        if name in _KEYS:
            return _KEYS[name]
        key = default_key(name.removeprefix("observations/"), self._storage.read(0, name))
        return "state" if key == "observations" else key


def write_minari(path: Path, episodes: Iterable[Episode], facts: FactsOfEpisodes) -> None:
    """Write episodes with closing frames and rewards as a dataset in HDF5, images without compression.

    Raises:
        UserError: An episode lacks a closing frame, rewards or terminations, or the name of the folder a version.
    """
    h5py = require("h5py", "hdf5")
    if not _DATASET_NAME.fullmatch(path.name):
        raise UserError(f"A Minari dataset needs a name with a version, such as {path.name or 'data'}-v0, got {path}.")
    steps, spaces = 0, {}
    with atomic_folder(path) as folder:
        (folder / "data").mkdir()
        # As in `write_robomimic`, HDF5 writes through a file of Python.
        with (folder / "data" / MAIN).open("w+b") as raw, h5py.File(raw, "w", track_order=True) as file:
            for index, episode in enumerate(episodes):
                group = file.create_group(f"episode_{index}")
                steps += _write_episode(group, index, episode)
                facts.add(episode)
                spaces = spaces or _spaces(episode)
        metadata = {
            "dataset_id": path.name,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "total_episodes": len(facts),
            "total_steps": steps,
            "minari_version": "0.5.0",
            **{name: json.dumps(space) for name, space in spaces.items()},
            NAME: facts.to_json(),
        }
        (folder / "data" / METADATA).write_text(json.dumps(metadata), encoding="utf-8")


def _write_episode(group: Any, index: int, episode: Episode) -> int:
    """Write one episode; return its number of actions."""
    arrays, count = episode.arrays, len(episode) - 1
    for key, what in _REQUIRED.items():
        if key not in arrays:
            raise UserError(f"Minari stores {what}, which episode {index} lacks.")
    last = np.arange(count) == count - 1
    terminated = last & bool(arrays["terminated"][-1])
    group.attrs["id"], group.attrs["total_steps"] = index, count
    if episode.seed >= 0:
        group.attrs["seed"] = episode.seed
    group["terminations"], group["truncations"] = terminated, last & ~terminated
    for key, array in arrays.items():
        if key in ("terminated", "closing"):
            continue
        if key in STEP_KEYS:
            group[_STORED.get(key, f"infos/{key}")] = array[:count]
        else:
            group[f"observations/{key.removeprefix(IMAGE_PREFIX)}"] = stored_images(key, array)
    return count


def _spaces(episode: Episode) -> dict[str, dict[str, Any]]:
    """Descriptions of the spaces, as Minari serialises them."""
    observed = {
        key.removeprefix(IMAGE_PREFIX): _box(stored_images(key, array))
        for key, array in episode.arrays.items()
        if key not in STEP_KEYS
    }
    observation = {"type": "Dict", "subspaces": observed}
    return {"observation_space": observation, "action_space": _box(episode.arrays["action"])}


def _box(array: Array) -> dict[str, Any]:
    shape = array.shape[1:]
    low, high = -np.inf, np.inf
    if array.dtype.kind in "iu":
        low, high = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
    elif array.dtype.kind == "b":
        low, high = False, True
    bounds = {"low": np.full(shape, low, array.dtype).tolist(), "high": np.full(shape, high, array.dtype).tolist()}
    return {"type": "Box", "dtype": array.dtype.name, "shape": list(shape), **bounds}


def _shapes(facts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that Arrow flattens, by name, from the descriptions of the spaces."""
    found: dict[str, tuple[int, ...]] = {}

    def collect(name: str, space: Any) -> None:
        if not isinstance(space, Mapping):
            return
        shape, inner = space.get("shape"), space.get("subspaces")
        if isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape):
            found[name] = tuple(shape)
        pairs = inner.items() if isinstance(inner, Mapping) else enumerate(inner) if isinstance(inner, list) else ()
        for key, subspace in pairs:
            collect(f"{name}/{key}", subspace)

    for name, entry in (("observations", "observation_space"), ("actions", "action_space")):
        if isinstance(facts.get(entry), str):
            collect(name, json_object(facts[entry], entry))
    return found
