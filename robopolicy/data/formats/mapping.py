"""Mapping of a foreign dataset to the keys of episodes: settings that no file states, and names, from a YAML file.

    source: demo.hdf5                  # optional: the mapping file then is a dataset itself
    rate: 20                           # Hz
    task: pick up the cube
    features:
      state: [obs/robot0_eef_pos, obs/robot0_gripper_qpos]
      image.front: {from: obs/agentview_image, flip: true}
      action: {from: actions, scale: [1, 1, -1]}

For recordings of ROS the names are topics: `state: {from: /joint_states, field: position, names: [a, b]}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robopolicy.constraints import Finite, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.files import parse_yaml
from robopolicy.schema import to_dict, with_defaults

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class FeatureMapping(Validated):
    """Origin of one key of the episodes."""

    source: tuple[str, ...] = ()  # names of arrays or topics, concatenated; `from` in the file
    scale: tuple[Finite, ...] = ()  # factors, one per entry or one for all; applied before `offset`
    offset: tuple[Finite, ...] = ()  # summands, one per entry or one for all
    flip: bool = False  # turn images upside down
    next: bool = False  # take the value of the following frame, e.g. the next position as the action
    field: str = ""  # path in a message, e.g. position or points.0.positions; empty: all its numbers
    names: tuple[str, ...] = ()  # joints of a message, in the order of the entries
    hold: bool = False  # messages of a topic count until the next one, however old, e.g. commands of a gripper
    size: tuple[PositiveInt, ...] = ()  # height and width to which images of a topic are scaled; empty: as they are


@dataclass(frozen=True)
class EpisodeMapping(Validated):
    """Topic whose newest message states whether an episode is in progress."""

    source: str = ""  # topic, e.g. of std_msgs/Bool; empty: a recording is one episode; `from` in the file
    field: str = "data"  # path in the message, through JSON text if there is any
    equals: Any = True  # value during an episode


@dataclass(frozen=True)
class DatasetMapping(Validated):
    """Settings of a foreign dataset that its files do not state, and names of its arrays or topics."""

    source: str = ""  # dataset, relative to the mapping file; empty: given elsewhere
    rate: NonNegative = 0.0  # [Hz] frames per second; 0: as the dataset states
    task: str = ""  # instruction or task id; empty: as the dataset states
    features: dict[str, FeatureMapping] = field(default_factory=dict)  # by key; arrays not named here keep their names
    drop: tuple[str, ...] = ()  # names of arrays or keys that are left out
    closing: bool = False  # keep the observation after the last action as a closing frame
    split: str = ""  # filter key of robomimic, e.g. train; empty: all episodes
    horizon: NonNegativeInt = 0  # frames per episode of D4RL data that do not mark time-outs; 0: they mark them
    episodes: EpisodeMapping = EpisodeMapping()  # of recordings
    frames: str = ""  # topic each of whose messages is a frame; empty: frames at equal distances of 1 / rate
    clock: str = ""  # stamp or receive: time of a message of a recording; empty: stamp, where one is set
    max_age: Positive = 0.25  # [s] greatest age of a message at a frame of a recording; an episode ends there
    gap: NonNegative = 0.0  # [s] pause of a recording that separates episodes; 0: none
    definitions: str = ""  # folder of .msg files, relative to the mapping file, for recordings without definitions
    repair: bool = False  # read an incomplete MCAP file up to its damage

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clock not in ("", "stamp", "receive"):
            raise UserError(f"clock must be stamp or receive, found '{self.clock}'.")
        for key, feature in self.features.items():
            if len(feature.size) not in (0, 2):
                raise UserError(f"'size' of '{key}' must be height and width, found {list(feature.size)}.")
            if not feature.source:
                raise UserError(f"Feature '{key}' needs the name of an array or a topic: {{from: NAME}}.")


def load_mapping(path: Path) -> DatasetMapping:
    """Read a mapping file; `source` and `definitions` become paths relative to the working directory.

    Raises:
        UserError: The file is missing, or a setting is unknown, missing or invalid.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read the mapping {path}: {' '.join(str(error).split())}.") from error
    try:
        return _mapping(path, data)
    except UserError as error:
        raise error if path.name in str(error) else UserError(f"{path.name}: {error}") from error


def _mapping(path: Path, data: Any) -> DatasetMapping:
    if not isinstance(data, Mapping):
        raise UserError("A mapping file holds settings such as 'rate: 20'.")
    settings = dict(data)
    for name in ("source", "definitions"):
        if isinstance(settings.get(name), str) and settings[name]:
            settings[name] = str(path.parent / settings[name])
    features, episodes = settings.get("features", {}), settings.get("episodes", {})
    if not isinstance(features, Mapping):
        raise UserError("'features' must map keys to names of arrays or topics.")
    settings["features"] = {str(key): to_dict(_feature(str(key), value)) for key, value in features.items()}
    settings["episodes"] = to_dict(with_defaults(EpisodeMapping, _renamed(episodes, "episodes"), "episodes"))
    return with_defaults(DatasetMapping, settings, path.name)


def _feature(key: str, value: Any) -> FeatureMapping:
    settings = _renamed(value if isinstance(value, Mapping) else {"from": value}, key)
    for name in ("source", "scale", "offset"):  # one entry may stand without its list
        if name in settings and not isinstance(settings[name], list):
            settings[name] = [settings[name]]
    return with_defaults(FeatureMapping, settings, f"features.{key}")


def _renamed(value: Any, where: str) -> dict[str, Any]:
    """Settings with `from` under its name in Python."""
    if not isinstance(value, Mapping):
        raise UserError(f"'{where}' must be settings such as {{from: NAME}}, found {value!r}.")
    names = value.get("from", "")
    if not all(isinstance(name, str) for name in (names if isinstance(names, list) else [names])):
        raise UserError(f"'from' of '{where}' must be the name of an array or a topic, found {names!r}.")
    return {("source" if name == "from" else str(name)): entry for name, entry in value.items()}
