"""Interface of readers of foreign datasets, and the common conversion of their arrays to episodes.

A reader yields the arrays of an episode under their own names; `OpenDataset` applies a mapping to them. An episode of T
actions has T rows of each array, or T + 1 rows of observations, the last of which follows the last action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from robopolicy.data.episodes import Array, Episode, Episodes, is_image
from robopolicy.data.formats.foreign import as_images, check_real, foreign_errors, native
from robopolicy.data.formats.lerobot.images import decode_image
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.stored_facts import EpisodeInfo
from robopolicy.errors import UserError
from robopolicy.spec import IMAGE_PREFIX, STEP_KEYS

FLAGS = ("terminated", "success", "bootstrap", "closing", "intervention")  # keys of boolean values
RATE_HINT = "state it with 'robopolicy data convert --rate HZ', or as 'rate' of a mapping file that names its 'source'"


class DatasetReader(ABC):
    """Reader of one foreign dataset."""

    format: str  # name of the format
    keys: dict[str, str]  # {array: key of the episodes} of arrays that are read without a mapping
    others: tuple[str, ...] = ()  # arrays that are read only if a mapping names them
    episodes: Sequence[EpisodeInfo]
    rate: float = 0.0  # [Hz] frames per second; 0 if the files do not state it
    rate_origin: str = ""  # where the files state it
    names: Mapping[str, tuple[str, ...]] = {}  # of entries, by key
    notes: tuple[str, ...] = ()  # for the user
    action_type: str = ""  # absolute | delta: actions are targets of a controller or changes; empty if unknown

    @abstractmethod
    def read(self, episode: int, name: str, feature: FeatureMapping) -> Array | list[bytes]:
        """Return an array of an episode, `(T, ...)` or `(T + 1, ...)`, or the bytes of as many PNG or JPEG images."""

    @property
    def features(self) -> Mapping[str, FeatureMapping]:
        """Keys that are read without a mapping."""
        return {key: FeatureMapping((name,)) for name, key in self.keys.items()}

    def close(self) -> None:
        """Close the files."""


class OpenDataset:
    """Dataset of any format, whose episodes are read when they are needed; a context manager.

    Args:
        path: Dataset, for messages.
        reader: Reader of its arrays.
        mapping: Settings that its files do not state.

    Raises:
        UserError: A setting is missing, or the mapping names arrays that the dataset lacks.
    """

    def __init__(self, path: Path, reader: DatasetReader, mapping: DatasetMapping) -> None:
        self.path, self.reader, self.mapping = path, reader, mapping
        self.format = reader.format
        self.num_episodes = len(reader.episodes)
        if not self.num_episodes:
            raise UserError(f"{path} contains no episodes.")
        self.features = _plan(reader, mapping)
        if "action" not in self.features:
            found = ", ".join([*reader.keys, *reader.others])
            raise UserError(f"{path} has no actions; map them in a mapping file, 'action: NAME' with one of {found}.")
        if not set(self.features) - set(STEP_KEYS):
            raise UserError(f"{path} has no observations; it has {', '.join(self.features)}.")
        rate = mapping.rate or reader.rate
        if not rate:
            raise UserError(f"{path} does not state its rate; {RATE_HINT}.")
        self.control_dt = 1.0 / rate
        self.rate_origin = "given" if mapping.rate else reader.rate_origin

    def origin(self) -> dict[str, Any]:
        """Facts about the dataset as plain values."""
        rate = {"rate": 1 / self.control_dt, "rate_origin": self.rate_origin}
        left = {"ignored": list(self.ignored), "notes": list(self.reader.notes)}
        return {"source": str(self.path), "source_format": self.format, **rate, **left}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Arrays of the dataset that are not read."""
        used = {name for feature in self.features.values() for name in feature.source}
        return tuple(name for name in (*self.reader.keys, *self.reader.others) if name not in used)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of the entries of vectors, by key."""
        named = {key: feature.names for key, feature in self.features.items() if feature.names}
        return {key: names for key, names in {**self.reader.names, **named}.items() if key in self.features}

    def __enter__(self) -> OpenDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.close()

    def __iter__(self) -> Iterator[Episode]:
        return map(self.episode, range(self.num_episodes))

    def read(self, *, images: bool = True) -> Episodes:
        """Read all episodes into memory, with or without the cameras."""
        parts = (self.episode(index, images=images) for index in range(self.num_episodes))
        episodes = Episodes.from_list(parts, self.control_dt)
        lengths = {key: array.shape[1:] for key, array in episodes.arrays.items()}
        names = {key: names for key, names in self.names.items() if lengths.get(key) == (len(names),)}
        return replace(episodes, names=names, action_type=self.reader.action_type)

    def camera_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes `(3, height, width)` of the cameras, from the first episode."""
        cameras = [key for key in self.features if is_image(key)]
        arrays = self.episode(0).arrays if cameras else {}
        return {key: arrays[key].shape[1:] for key in cameras}

    def episode(self, index: int, *, images: bool = True) -> Episode:
        """Read one episode, with or without the cameras."""
        info = self.reader.episodes[index]
        with foreign_errors(self.path):
            if info.length < 1:
                raise UserError(f"Episode {info.name} has no actions; remove it.")
            return self._episode(index, info, images=images)

    def _episode(self, index: int, info: EpisodeInfo, *, images: bool) -> Episode:
        values: dict[str, Array] = {}
        encoded: dict[str, list[bytes]] = {}
        length = info.length
        for key, feature in self.features.items():
            if is_image(key) and not images:
                continue
            value, pictures = self._value(index, info, key, feature)
            if feature.next:
                value, pictures = value[1:], pictures[1:]
                length = min(length, len(value))
            values[key] = value
            if pictures:
                encoded[key] = pictures
        if length < 1:
            raise UserError(f"Episode {info.name} has a single frame, whose next one is required; remove it.")
        arrays = {key: value[:length] for key, value in values.items()}
        if "terminated" in values:
            arrays["terminated"] = _last_flag(values["terminated"], length, info.name)
        episode = Episode(
            arrays, self.mapping.task or info.task, info.seed, info.behaviour,
            {key: pictures[:length] for key, pictures in encoded.items()},
        )  # fmt: skip
        return self._with_closing_frame(episode, values, encoded, info) if self.mapping.closing else episode

    def _with_closing_frame(
        self, episode: Episode, values: Mapping[str, Array], encoded: Mapping[str, list[bytes]], info: EpisodeInfo
    ) -> Episode:
        length = len(episode)
        observations = [key for key in values if key not in STEP_KEYS]
        if missing := [key for key in observations if len(values[key]) <= length]:
            raise UserError(f"'{missing[0]}' of episode {info.name} has no row after the last action to keep.")
        closed = episode.with_closing_frame({key: values[key][length] for key in observations})
        return Episode(**{**closed.__dict__, "encoded": {key: value[: length + 1] for key, value in encoded.items()}})

    def _value(self, index: int, info: EpisodeInfo, key: str, feature: FeatureMapping) -> tuple[Array, list[bytes]]:
        """Rows of a key, and the bytes of its images if it is stored as PNG or JPEG."""
        parts: list[Array] = []
        pictures: list[bytes] = []
        for name in feature.source:
            found = self.reader.read(index, name, feature)
            if isinstance(found, list):
                pictures = found
                found = np.stack([decode_image(data, f"'{name}'") for data in found])
            check_real(name, found.dtype)
            longest = info.length + (key not in STEP_KEYS)
            if found.ndim < 1 or not info.length <= len(found) <= longest:
                rows = len(found) if found.ndim else "no"
                raise UserError(f"'{name}' of episode {info.name} has {rows} rows for {info.length} actions.")
            if 0 in found.shape[1:]:
                raise UserError(
                    f"'{name}' of episode {info.name} has rows of shape {found.shape[1:]}, without numbers."
                )
            parts.append(native(found))
        if len(parts) > 1:
            rows = min(map(len, parts))
            return _scaled(np.concatenate([part[:rows].reshape(rows, -1) for part in parts], 1), key, feature), []
        value = _shaped(parts[0], key, feature, info.name)
        unchanged = pictures and not feature.flip
        return _scaled(value, key, feature), pictures if unchanged else []


def _plan(reader: DatasetReader, mapping: DatasetMapping) -> dict[str, FeatureMapping]:
    """Features to read: the mapping, and the arrays of the reader that it neither uses nor drops."""
    known = (*reader.keys, *reader.others)
    used = {name for feature in mapping.features.values() for name in feature.source}
    for name in (*used, *mapping.drop):
        if name not in known and name not in reader.keys.values():
            raise UserError(f"The dataset has no array '{name}'; it has {', '.join(known)}.")
    plan = dict(mapping.features)
    for key, feature in reader.features.items():
        if key not in plan and not {key, *feature.source} & {*used, *mapping.drop}:
            plan[key] = feature
    return plan


def _shaped(value: Array, key: str, feature: FeatureMapping, episode: str) -> Array:
    """Rows in the shape of episodes."""
    if key in FLAGS:
        return np.asarray(value.reshape(len(value), -1).any(1))
    if key == "reward":
        if value.size != len(value):
            raise UserError(
                f"'{feature.source[0]}' of episode {episode} has {value.size} rewards for {len(value)} frames."
            )
        return value.reshape(-1)
    if key in ("action", "executed", "policy_action"):
        return value.reshape(len(value), -1) if value.ndim < 3 else value
    if is_image(key):
        images = value if value.ndim == 4 and value.shape[1] == 3 and value.dtype == np.uint8 else as_images(value)
        if images is None:
            raise UserError(f"'{feature.source[0]}' of episode {episode} holds no RGB images of 8 bits.")
        return np.ascontiguousarray(images[:, :, ::-1]) if feature.flip else images
    return value.reshape(len(value), -1) if value.ndim < 2 else value


def _scaled(value: Array, key: str, feature: FeatureMapping) -> Array:
    """Apply `scale` and `offset`."""
    if not feature.scale and not feature.offset:
        return value
    for name in ("scale", "offset"):
        if len(getattr(feature, name)) not in (0, 1, value.shape[-1]):
            raise UserError(
                f"'{name}' of '{key}' needs 1 or {value.shape[-1]} numbers, found {len(getattr(feature, name))}."
            )
    dtype = value.dtype if value.dtype.kind == "f" else np.dtype(np.float32)
    scale, offset = np.array(feature.scale or (1.0,)), np.array(feature.offset or (0.0,))
    return (value * scale + offset).astype(dtype)


def _last_flag(flags: Array, length: int, episode: str) -> Array:
    """`terminated` of an episode: true on its last frame at most."""
    if flags[: len(flags) - 1].any():
        raise UserError(f"Episode {episode} terminates before its last frame; split it there.")
    last = np.zeros(length, np.bool_)
    last[-1] = flags[-1]
    return last


def default_key(name: str, value: Array | list[bytes]) -> str:
    """Key of an observation that is stored as `name`, of which `value` are rows."""
    name = name.strip("/").replace("/", ".")
    pictures = isinstance(value, list) or as_images(value) is not None
    return name if not pictures or name.startswith(IMAGE_PREFIX) else IMAGE_PREFIX + name
