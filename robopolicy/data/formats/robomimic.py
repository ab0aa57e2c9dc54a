"""HDF5 files in the layout of robomimic (Mandlekar et al. 2021), and its variants of LIBERO, MimicGen and Isaac Lab.

    data                     attributes: env_args (JSON), total
    data/demo_<i>            attributes: num_samples; Isaac Lab: success
      actions (T, A)  rewards (T,)  dones (T,)  obs/<key> (T, ...)  next_obs/<key> (T, ...)
      actions_abs (T, A)  states (T, D)  action_dict/<key>          read only where a mapping names them
    mask/<split>             names of demonstrations

`dones` depends on an option of robomimic's converter, so it never counts as `terminated`. Our writer adds `terminated`,
`success` and other results of steps as arrays under their own names, and what no array holds in an attribute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.atomic import atomic_file
from robopolicy.data.episodes import Array, Episode
from robopolicy.data.formats.foreign import find_number, find_text, foreign_errors, json_object
from robopolicy.data.formats.hdf5 import Hdf5File, length
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.reader import DatasetReader, default_key
from robopolicy.data.formats.stored_facts import NAME, FactsOfEpisodes, StoredFacts, stored_images
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.spec import IMAGE_PREFIX, STEP_KEYS

_OWN = tuple(key for key in STEP_KEYS if key not in ("action", "reward"))  # results of steps under their own names
_SUCCESS = "success of the demonstration"  # an attribute or rewards of 0 and 1, as an array


class RobomimicReader(DatasetReader):
    """Reader of one file."""

    format = "robomimic"

    def __init__(self, path: Path, mapping: DatasetMapping) -> None:
        self._file, self._closing = Hdf5File(path), mapping.closing
        try:
            with foreign_errors(path):
                self._open(mapping)
        except BaseException:
            self.close()
            raise

    def _open(self, mapping: DatasetMapping) -> None:
        file = self._file
        data = file.group(file.root, "data")
        names = sorted(data, key=_by_number)
        if mapping.split:
            names = [name for name in names if name in self._split(mapping.split)]
        self._demos = [file.group(data, name) for name in names]
        if not self._demos:
            raise UserError("'data' has no demonstrations.")
        first = self._demos[0]
        if file.child(first, "obs") is None and file.child(first, "states") is not None:
            raise UserError(
                "It holds states of a simulator and no observations; extract them first, with robomimic's "
                "dataset_states_to_obs."
            )
        self.keys, self.others = self._arrays(first)
        self._check_equal_keys(names)
        env = json_object(file.text(data, "env_args") or "{}", "env_args")
        facts = json_object(file.text(data, NAME) or "{}", NAME)
        stored = StoredFacts.from_dict(facts, len(self._demos))
        self.names = stored.names
        self._set_rate(stored, env)
        self.action_type = _action_type(mapping, env) or stored.action_type
        task = find_text(json_object(file.text(data, "problem_info") or "{}", "problem_info"), "language_instruction")
        task = task or find_text(env, "env_name")
        self.episodes = [
            stored.info(index, name, self._length(demo), self._instruction(demo) or task)
            for index, (name, demo) in enumerate(zip(names, self._demos, strict=True))
        ]
        if file.text(data, "macros_image_convention") == "opengl":
            self.notes = ("images are upside down (macros_image_convention is opengl); flip: true turns them",)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, episode: int, name: str, feature: FeatureMapping) -> Array | list[bytes]:
        """Read an array of a demonstration, with the last row of `next_obs` if closing frames are required."""
        demo = self._demos[episode]
        if name == _SUCCESS:
            if "success" not in demo.attrs:
                return np.asarray(self._file.read(self._file.child(demo, "rewards"))) > 0
            count = self.episodes[episode].length
            return (np.arange(count) == count - 1) & bool(demo.attrs["success"])
        member = self._file.child(demo, name)
        if member is None:
            raise UserError(f"'{name}' is missing in {demo.name}.")
        values = self._file.read(member)
        after = self._file.child(demo, f"next_{name}") if self._closing and name.startswith("obs/") else None
        if after is None:
            return values
        last = self._file.read(after)
        return [*values, last[-1]] if isinstance(values, list) else np.concatenate([values, last[-1:]])

    def _arrays(self, demo: Any) -> tuple[dict[str, str], tuple[str, ...]]:
        """Arrays with their keys that are read by default, and the other ones."""
        keys: dict[str, str] = {}
        others: list[str] = []
        for name, member in self._file.arrays(demo):
            if name == "obs":
                keys[name] = "state"
            elif name.startswith("obs/"):
                keys[name] = default_key(name.removeprefix("obs/"), self._first_row(member))
            elif name in ("actions", "rewards", *_OWN):
                keys[name] = {"actions": "action", "rewards": "reward"}.get(name, name)
            elif not name.startswith("next_obs/"):
                others.append(name)
        if "success" not in keys and ("success" in demo.attrs or self._has_sparse_rewards()):
            keys[_SUCCESS] = "success"
        return keys, tuple(others)

    def _has_sparse_rewards(self) -> bool:
        """Whether all rewards are 0 or 1, and thus mark success."""
        rewards = [self._file.child(demo, "rewards") for demo in self._demos]
        return all(each is not None and np.isin(self._file.read(each), (0, 1)).all() for each in rewards)

    def _first_row(self, member: Any) -> Array | list[bytes]:
        if member.dtype.kind == "O":
            return self._file.read(member)
        return np.asarray(self._file.checked(member)[:1]) if member.ndim else np.zeros(0)

    def _check_equal_keys(self, names: list[str]) -> None:
        expected = {name for name in self.keys if name != _SUCCESS}
        for name, demo in zip(names, self._demos, strict=True):
            found = {path for path, _ in self._file.arrays(demo)}
            if missing := sorted(expected - found) or sorted(
                path for path in found - expected if path.startswith("obs/")
            ):
                raise UserError(f"Demonstrations differ: '{missing[0]}' is not in both {names[0]} and {name}.")
            if ("success" in demo.attrs) != ("success" in self._demos[0].attrs):
                raise UserError(f"Demonstrations differ: attribute 'success' is not in both {names[0]} and {name}.")

    def _length(self, demo: Any) -> int:
        member = self._file.child(demo, "actions")
        return 0 if member is None else length(self._file.checked(member))

    def _instruction(self, demo: Any) -> str:
        return find_text(json_object(self._file.text(demo, "ep_meta") or "{}", "ep_meta"), "lang")

    def _set_rate(self, stored: StoredFacts, env: Mapping[str, Any]) -> None:
        step = find_number(env, "sim_args", "dt") * find_number(env, "sim_args", "decimation")
        for rate, origin in (
            (1 / stored.control_dt if stored.control_dt else 0.0, f"attribute {NAME}"),
            (find_number(env, "env_kwargs", "control_freq"), "env_kwargs.control_freq of env_args"),
            (1 / step if step else 0.0, "sim_args of env_args"),
        ):
            if rate:
                self.rate, self.rate_origin = rate, origin
                return

    def _split(self, split: str) -> set[str]:
        file = self._file
        masks = file.group(file.root, "mask")
        if split not in masks:
            raise UserError(f"There is no split '{split}'; there are {', '.join(masks)}.")
        members = {name: self._names(file.child(masks, name)) for name in masks}
        both = members.get("train", set()) & members.get("valid", set())
        if both:
            raise UserError(f"Demonstration {min(both)} is in both splits, train and valid.")
        return members[split]

    def _names(self, member: Any) -> set[str]:
        """Names of demonstrations in an array."""
        if not self._file.is_array(member):
            raise UserError("'mask' must hold arrays of names.")
        self._file.check_storage(member)
        return {_text(entry) for entry in member[()]}


def write_robomimic(path: Path, episodes: Iterable[Episode], facts: FactsOfEpisodes) -> None:
    """Write episodes as a file of robomimic, one demonstration each; closing frames become the end of `next_obs`."""
    h5py = require("h5py", "hdf5")
    total, task = 0, ""
    # HDF5 writes through a file of Python, because its own driver crashes on a full disk.
    with atomic_file(path) as temporary, temporary.open("w+b") as raw, h5py.File(raw, "w") as file:
        data = file.create_group("data")
        for index, episode in enumerate(episodes):
            total += _write_demo(data.create_group(f"demo_{index}"), episode)
            facts.add(episode)
            task = task or episode.task
        data.attrs["total"] = total
        env = {"env_name": task, "type": 2, "env_kwargs": {"control_freq": 1 / facts.control_dt}}
        data.attrs["env_args"] = json.dumps(env)
        data.attrs[NAME] = facts.to_json()


def _write_demo(demo: Any, episode: Episode) -> int:
    """Write one demonstration; return its number of actions."""
    count = len(episode) - ("closing" in episode.arrays)
    demo.attrs["num_samples"] = count
    if "success" in episode.arrays:
        demo.attrs["success"] = episode.success
    for key, array in episode.arrays.items():
        if key == "terminated":
            demo["terminated"] = (np.arange(count) == count - 1) & bool(array[-1])
        elif key in STEP_KEYS:
            if key != "closing":
                demo[{"action": "actions", "reward": "rewards"}.get(key, key)] = array[:count]
        else:
            values, name = stored_images(key, array), key.removeprefix(IMAGE_PREFIX)
            demo[f"obs/{name}"] = values[:count]
            if "closing" in episode.arrays:
                demo[f"next_obs/{name}"] = values[1:]
    demo["dones"] = np.arange(count) == count - 1
    return count


def _action_type(mapping: DatasetMapping, env: Mapping[str, Any]) -> str:
    """Whether actions are absolute or delta: by the name of their array, or by `env_args`."""
    feature = mapping.features.get("action")
    kinds = {_kind_of_array(name) for name in (feature.source if feature else ("actions",))} - {""}
    if kinds:
        return kinds.pop() if len(kinds) == 1 else ""
    settings = env.get("env_kwargs")
    controller = settings.get("controller_configs") if isinstance(settings, Mapping) else None
    if not isinstance(controller, Mapping):
        return ""
    if isinstance(controller.get("control_delta"), bool):  # robosuite before 1.5
        return "delta" if controller["control_delta"] else "absolute"
    kind = find_text(controller, "body_parts", "right", "input_type")
    return kind if kind in ("absolute", "delta") else ""


def _kind_of_array(name: str) -> str:
    if name == "actions_abs" or name.startswith("action_dict/abs_"):
        return "absolute"
    return "delta" if name.startswith("action_dict/rel_") else ""


def _by_number(name: str) -> tuple[str, int, str]:
    """Order of demo_2 before demo_10; HDF5 orders by letters."""
    match = re.fullmatch(r"(.*?)(\d{1,18})", name)
    return (match[1], int(match[2]), name) if match else (name, -1, name)


def _text(entry: Any) -> str:
    return entry.decode() if isinstance(entry, bytes) else str(entry)
