"""Flat arrays over the frames of all episodes: D4RL's HDF5, npz files, and the part of zarr that is the same.

Episodes of D4RL (Fu et al. 2020) end where `terminals` or `timeouts` is true, and at the end of the file. Files of
OGBench have a state after the last action, at which their `terminals` are true. Our own npz files, and the replay
buffers of Diffusion Policy (Chi et al. 2023), store `episode_ends` `(E,)`, one past the last frame of each episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.archives import DATASET_BYTES, DEFLATE_RATIO, read_arrays
from robopolicy.atomic import atomic_file
from robopolicy.data.episodes import Array, Episode
from robopolicy.data.formats.foreign import check_real, foreign_errors, json_object
from robopolicy.data.formats.hdf5 import Hdf5File, length
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.ogbench import CONTROL_DT, has_ogbench_names
from robopolicy.data.formats.reader import DatasetReader, default_key
from robopolicy.data.formats.stored_facts import NAME, FactsOfEpisodes, StoredFacts, stored_images
from robopolicy.errors import UserError
from robopolicy.spec import IMAGE_PREFIX, STEP_KEYS

ENDS = "episode_ends"
_KEYS = {"actions": "action", "rewards": "reward", "observations": "state"}
_FRAMES = ("observations", "rewards", "terminals", "timeouts")  # beginnings of names of arrays with a row per frame
_RESERVED = {NAME, ENDS, "file", "allow_pickle"}  # the last two are parameters of np.savez
_NO_OBSERVATIONS = ("next_observations", "timeouts", "infos/", "metadata/")  # beginnings of names in D4RL files


class FlatReader(DatasetReader):
    """Reader of arrays over all frames.

    Args:
        format: Name of the format.
        arrays: Arrays `(F, ...)` by name, from which ranges of rows can be read.
        ends: `(E,)` index one past the last frame of each episode.
        others: Arrays that are read only if a mapping names them.
        facts: Facts of our own files.
        closing: Whether the last row of each episode follows its last action.
        close: Function that closes the files.
    """

    def __init__(
        self,
        format: str,
        arrays: Mapping[str, Any],
        ends: Array,
        others: Iterable[str] = (),
        facts: Mapping[str, Any] | None = None,
        *,
        closing: bool = False,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.format, self._close = format, close
        self._arrays, self._ends = arrays, check_ends(ends, _rows(arrays))
        self._starts = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])
        self._closing = closing
        self.others = tuple(others)
        self.keys = {name: self._key(name) for name in arrays if name not in self.others}
        stored = StoredFacts.from_dict(facts or {}, len(ends))
        self.names, self.action_type = stored.names, stored.action_type
        if stored.control_dt:
            self.rate, self.rate_origin = 1 / stored.control_dt, f"entry {NAME}"
        lengths = self._ends - self._starts - closing
        self.episodes = [stored.info(index, str(index), int(each)) for index, each in enumerate(lengths)]

    def read(self, episode: int, name: str, feature: FeatureMapping) -> Array | list[bytes]:
        """Read the rows of an episode; actions and results of steps without the row after the last action."""
        end = int(self._ends[episode]) - (self._closing and self.keys.get(name) in STEP_KEYS)
        return np.asarray(self._arrays[name][int(self._starts[episode]) : end])

    def close(self) -> None:
        """Close the files."""
        if self._close is not None:
            self._close()

    def _key(self, name: str) -> str:
        if name in STEP_KEYS:
            return name
        if name == "terminals":
            return "terminated"
        first = np.asarray(self._arrays[name][:1])
        key = default_key(name, first)
        return _KEYS.get(name, key) if key == name else key


def check_ends(ends: Array, frames: int) -> Array:
    """Return ends of episodes as integers `(E,)`; raises a `UserError` unless they rise to the number of frames."""
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends):
        raise UserError(f"'{ENDS}' must hold one whole number per episode, found {ends.dtype} {ends.shape}.")
    whole = ends.astype(np.int64)
    if np.any(np.diff(whole, prepend=0) <= 0) or whole[-1] != frames:
        raise UserError(f"'{ENDS}' must rise to the number of frames {frames}, found {whole.tolist()[:8]}.")
    return whole


def open_d4rl(path: Path, mapping: DatasetMapping) -> FlatReader:
    """Open an HDF5 file of D4RL, or of the same arrays."""
    file = Hdf5File(path)
    try:
        with foreign_errors(path):
            members = dict(file.arrays(file.root))
            required = [name for name in members if name == "actions" or name.startswith(_FRAMES)]
            numeric = [name for name, member in members.items() if member.dtype.kind in "biuf"]
            arrays = {name: file.checked(members[name]) for name in dict.fromkeys([*required, *numeric])}
            return _d4rl("d4rl", arrays, mapping, file.close)
    except BaseException:
        file.close()
        raise


def open_npz(path: Path, mapping: DatasetMapping) -> FlatReader:
    """Open an npz file: our own, or with the names of D4RL or OGBench."""
    if not path.is_file():
        raise UserError(f"No file at {path}.")
    with foreign_errors(path):
        arrays: dict[str, Any] = dict(read_arrays(path, DATASET_BYTES, DEFLATE_RATIO))
        facts = json_object(arrays.pop(NAME).tobytes(), NAME) if NAME in arrays else {}
        if ENDS in arrays:
            return FlatReader("npz", arrays, arrays.pop(ENDS), facts=facts)
        if has_ogbench_names(arrays):
            reader = FlatReader("ogbench", *_without_ends(arrays), closing=True)
            reader.rate, reader.rate_origin = 1 / CONTROL_DT, "the manipulation environments of OGBench"
            return reader
        return _d4rl("npz", arrays, mapping)


def write_npz(path: Path, episodes: Iterable[Episode], facts: FactsOfEpisodes) -> None:
    """Write episodes as one npz file without compression, so that its arrays can be mapped into memory.

    Raises:
        UserError: A key has a name that the file needs for something else.
    """
    ends, parts = [0], dict[str, list[Array]]()
    for episode in episodes:
        for key, array in episode.arrays.items():
            parts.setdefault(key.removeprefix(IMAGE_PREFIX), []).append(stored_images(key, array))
        ends.append(ends[-1] + len(episode))
        facts.add(episode)
    if taken := sorted(_RESERVED & parts.keys()):
        raise UserError(f"An npz file cannot store an array named '{taken[0]}'; rename the observation or camera.")
    arrays: dict[str, Any] = {name: np.concatenate(rows) for name, rows in parts.items()}
    arrays[NAME] = np.frombuffer(facts.to_json().encode(), np.uint8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **{ENDS: np.array(ends[1:])}, **arrays)


def _d4rl(
    format: str, arrays: dict[str, Any], mapping: DatasetMapping, close: Callable[[], None] | None = None
) -> FlatReader:
    if "actions" not in arrays:
        raise UserError(f"It has neither '{ENDS}' nor 'actions'; it has {', '.join(arrays) or 'no arrays'}.")
    frames = length(arrays["actions"])
    for name, array in arrays.items():
        if name.startswith(_FRAMES) and length(array) != frames:
            raise UserError(f"'{name}' has {length(array)} rows for {frames} actions.")
    arrays = {name: array for name, array in arrays.items() if length(array) == frames}
    flags = [np.asarray(arrays[name][:]).reshape(-1) > 0 for name in ("terminals", "timeouts") if name in arrays]
    if not flags:
        raise UserError("It has neither 'terminals' nor 'timeouts', which end its episodes.")
    done = np.logical_or.reduce(flags)
    if "timeouts" not in arrays and not mapping.horizon:
        raise UserError("It has no 'timeouts', so set 'horizon', the frames of an episode, in a mapping file.")
    ends = _ends(done, mapping.horizon if "timeouts" not in arrays else 0)
    others = [name for name in arrays if name.startswith(_NO_OBSERVATIONS)]
    return FlatReader(format, arrays, ends, others, close=close)


def _ends(done: Array, horizon: int) -> Array:
    """Ends of episodes, of at most `horizon` frames each if it is not 0."""
    ends: list[int] = []
    for end in [*(np.flatnonzero(done) + 1).tolist(), len(done)]:
        start = ends[-1] if ends else 0
        if horizon:
            ends += range(start + horizon, end, horizon)
        if end > start:
            ends.append(end)
    return np.array(ends, np.int64)


def _without_ends(arrays: dict[str, Any]) -> tuple[dict[str, Any], Array]:
    """Arrays of OGBench without `terminals`, and the ends of episodes."""
    flags = np.asarray(arrays.pop("terminals")).reshape(-1) > 0
    if not flags[-1:].any():
        raise UserError("Its last state does not end an episode.")
    return arrays, np.flatnonzero(flags) + 1


def _rows(arrays: Mapping[str, Any]) -> int:
    """Number of rows of all arrays; raises a `UserError` if they differ or hold no numbers."""
    for name, array in arrays.items():
        check_real(name, array.dtype)
    found = {name: length(array) for name, array in arrays.items()}
    if len(set(found.values())) != 1:
        raise UserError(f"Its arrays differ in length: {', '.join(f'{name} {rows}' for name, rows in found.items())}.")
    return next(iter(found.values()))
