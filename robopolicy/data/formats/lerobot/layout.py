"""Layout of the LeRobotDataset v3.0 format and the mapping of episode keys to its features.

meta/info.json  meta/stats.json  meta/tasks.parquet
meta/episodes/chunk-000/file-000.parquet        one row per episode
data/chunk-000/file-000.parquet                 one row per frame, one row group per episode, many episodes per file
videos/<feature>/chunk-000/file-000.mp4         many episodes per file
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from robopolicy.data.episodes import is_image
from robopolicy.errors import UserError
from robopolicy.spec import IMAGE_PREFIX

MAX_FPS = 10_000


_LIBRARY_ERRORS = (pa.ArrowException, av.FFmpegError, Image.DecompressionBombError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert every error of reading the damaged file `path` to a `UserError` of one line."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, TypeError, LookupError, OverflowError, AttributeError, *_LIBRARY_ERRORS) as error:
        raise UserError(f"Cannot read {path}: {_reason(error)}; copy or collect the dataset again.") from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TypeError | LookupError | AttributeError):
        return "its entries do not match the LeRobot format"
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def check_info(info: Any) -> dict[str, Any]:
    """Check the content of `meta/info.json` and return it; raise a `ValueError` if an entry is missing or invalid."""
    if not isinstance(info, dict):
        raise ValueError("it must be an object with entries")
    check_entries(info, ("codebase_version", "fps", "features", "data_path"))
    fps = info["fps"]
    if not _is_number(fps) or not 1 / MAX_FPS <= fps <= MAX_FPS:
        raise ValueError(f"'fps' must be a number from {1 / MAX_FPS:g} to {MAX_FPS}, found {_abbreviated(fps)}")
    if not isinstance(info["features"], dict):
        raise ValueError(f"'features' must be an object by name, found {_abbreviated(info['features'])}")
    for name, feature in info["features"].items():
        _check_feature(name, feature)
    has_video = any(feature["dtype"] == "video" for feature in info["features"].values())
    for key in ("data_path", "video_path") if has_video else ("data_path",):
        _check_template(key, info.get(key))
    return info


def check_entries(found: Iterable[str], required: Iterable[str], what: str = "entry") -> None:
    """Raise a `ValueError` if a required entry is missing."""
    present = set(found)
    for name in required:
        if name not in present:
            raise ValueError(f"{what} '{name}' is missing")


def integer_entry(entry: Mapping[str, Any], name: str, minimum: int = 0) -> int:
    """Return an integer entry of a metadata row; raise a `ValueError` if it is missing, no integer or too small."""
    check_entries(entry, (name,))
    value = entry[name]
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**63:
        raise ValueError(f"'{name}' must be an integer of {minimum} or more, found {_abbreviated(value)}")
    return value


def _check_feature(name: str, feature: Any) -> None:
    if name in ("", ".", "..") or _separators(name):
        raise ValueError(f"a feature has the name {json.dumps(name)}, which is no name of a folder")
    if not isinstance(feature, dict):
        raise ValueError(f"feature '{name}' must be an object, found {_abbreviated(feature)}")
    check_entries(feature, ("dtype", "shape"), f"feature '{name}': entry")
    dtype, shape = feature["dtype"], feature["shape"]
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of feature '{name}' must be a name such as float32, found {_abbreviated(dtype)}")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(
            f"the shape of feature '{name}' must be a list of sizes of 1 or more, found {_abbreviated(shape)}"
        )
    if dtype in ("image", "video") and len(shape) != 3:
        raise ValueError(f"the shape of camera '{name}' must be three sizes, found {_abbreviated(shape)}")
    try:
        json.dumps(feature, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"feature '{name}' has a number that is not finite") from error


def _separators(name: str) -> str:
    """Characters of a name that separate or end paths."""
    return "".join(character for character in "/\\\0" if character in name)


def _check_template(key: str, template: Any) -> None:
    known = ("chunk_index", "file_index", "episode_chunk", "episode_index", "video_key")
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except (TypeError, ValueError):
        fields = [""]
    if not set(fields) <= set(known):
        raise ValueError(f"'{key}' must be a file path such as data/file-{{file_index}}.parquet")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _abbreviated(value: Any) -> str:
    """JSON text of a value, truncated."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]} ..."


VERSION = "v3.0"
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES = f"meta/episodes/{FILE}.parquet"
DATA = f"data/{FILE}.parquet"
VIDEO = f"videos/{{video_key}}/{FILE}.mp4"
FILES_PER_CHUNK = 1000
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200  # sizes at which new files begin

DONE, TRUNCATED = "next.done", "next.truncated"
INDEX_FEATURES = {
    "timestamp": "float32",  # seconds since the start of the episode
    "frame_index": "int64",  # within the episode
    "episode_index": "int64",
    "index": "int64",  # within the dataset
    "task_index": "int64",
}

_STEP_FEATURES = {
    "action": "action",
    "executed": "executed",
    "policy_action": "policy_action",
    "intervention": "intervention",
    "reward": "next.reward",
    "bootstrap": "bootstrap",
    "success": "next.success",
    "closing": "closing",
}
_STEP_KEYS = {feature: key for key, feature in _STEP_FEATURES.items()}
_STEP_KEYS["complementary_info.is_intervention"] = "intervention"  # of HIL-SERL in LeRobot
IMAGES, _OBSERVATION = "observation.images.", "observation."


def feature_of(key: str) -> str:
    """LeRobot feature of `key`, except for `terminated`, which becomes `next.done` and `next.truncated`."""
    if found := _separators(key):
        text = f"LeRobot feature names must not contain {found[0]!r}, found {key!r}"
        raise UserError(f"{text}; rename the observation or camera.")
    if is_image(key):
        return IMAGES + key.removeprefix(IMAGE_PREFIX)
    return _STEP_FEATURES.get(key, _OBSERVATION + key)


def key_of(feature: str, *, camera: bool) -> str | None:
    """Episode key of a LeRobot feature; None for features outside of episodes."""
    if camera:
        return IMAGE_PREFIX + feature.removeprefix(IMAGES).removeprefix(_OBSERVATION)
    if feature.startswith(_OBSERVATION):
        return feature.removeprefix(_OBSERVATION)
    return _STEP_KEYS.get(feature)


def frame_rate(control_dt: float) -> Fraction:
    """Frames per second, exact for decimal control steps [s]; raise a `UserError` outside the range of the format."""
    if not 1 / MAX_FPS <= control_dt <= MAX_FPS:
        span = f"{1 / MAX_FPS:g} to {MAX_FPS} s"
        raise UserError(f"A LeRobot dataset needs control steps of {span}, got control_dt={control_dt}.")
    return Fraction(1.0 / float(control_dt)).limit_denominator(MAX_FPS)


def plain_rate(rate: Fraction) -> int | float:
    """Frame rate as a JSON number."""
    return int(rate) if rate.denominator == 1 else float(rate)


def vector_feature(array: NDArray[Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Description of a column of scalars `(T,)`, vectors `(T, D)` or larger arrays, e.g. point clouds `(T, N, 3)`."""
    shape = [int(size) for size in array.shape[1:]] or [1]
    return {"dtype": array.dtype.name, "shape": shape, "names": list(names) or None}


def check_array(key: str, array: Any) -> None:
    """Raise a `UserError` if `array` is not an array of numbers or has empty frames."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UserError(f"'{key}' of an episode must be a numpy array of real numbers, found {found}.")
    if 0 in array.shape[1:]:
        raise UserError(f"'{key}' of an episode has frames of shape {array.shape[1:]}, without numbers; drop it.")


def names_of(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the entries of a vector, from a list or a mapping such as {"motors": [...]}; () without names."""
    names = feature.get("names")
    if isinstance(names, Mapping) and len(names) == 1:
        (names,) = names.values()
    if not isinstance(names, list) or [len(names)] != list(feature["shape"]):
        return ()
    return tuple(map(str, names))


def action_feature(feature: Mapping[str, Any], action_type: str) -> dict[str, Any]:
    """Description of the action that states whether it is absolute or delta."""
    return {**feature, "info": {"action_type": action_type}} if action_type else dict(feature)


def action_type_of(feature: Mapping[str, Any]) -> str:
    """Inverse of `action_feature`; empty if unknown."""
    info = feature.get("info")
    found = info.get("action_type") if isinstance(info, Mapping) else ""
    return found if found in ("absolute", "delta") else ""


def image_feature(images: NDArray[Any], video_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Description of a camera `(T, 3, height, width)`, stored as video where `video_info` is given."""
    shape = [int(images.shape[2]), int(images.shape[3]), 3]
    feature: dict[str, Any] = {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
    return feature if video_info is None else {**feature, "dtype": "video", "info": dict(video_info)}


def index_features() -> dict[str, dict[str, Any]]:
    """Descriptions of the index columns of every dataset."""
    return {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in INDEX_FEATURES.items()}


def dataset_info(
    features: Mapping[str, Mapping[str, Any]],
    rate: Fraction,
    *,
    episodes: int,
    frames: int,
    tasks: int,
    data_file_mb: int = DATA_FILE_MB,
    video_file_mb: int = VIDEO_FILE_MB,
) -> dict[str, Any]:
    """Content of `meta/info.json`."""
    return {
        "codebase_version": VERSION,
        "fps": plain_rate(rate),
        "features": features,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": data_file_mb,
        "video_files_size_in_mb": video_file_mb,
        "data_path": DATA,
        "video_path": VIDEO if any(feature["dtype"] == "video" for feature in features.values()) else None,
        "robot_type": None,
        "splits": {"train": f"0:{episodes}"},
    }


def huggingface_metadata(features: Mapping[str, Mapping[str, Any]]) -> dict[bytes, bytes]:
    """Schema metadata for image columns and fixed-size vectors in the `datasets` package."""

    def column(feature: Mapping[str, Any]) -> dict[str, Any]:
        if feature["dtype"] == "image":
            return {"_type": "Image"}
        shape = feature["shape"]
        if len(shape) > 1:
            return {"shape": shape, "dtype": feature["dtype"], "_type": f"Array{len(shape)}D"}
        value = {"dtype": feature["dtype"], "_type": "Value"}
        return value if shape == [1] else {"feature": value, "length": shape[0], "_type": "Sequence"}

    columns = {name: column(feature) for name, feature in features.items() if feature["dtype"] != "video"}
    return {b"huggingface": json.dumps({"info": {"features": columns}}).encode()}


def pandas_index_metadata() -> dict[bytes, bytes]:
    """Schema metadata that makes the column `task` of `tasks.parquet` the index in pandas."""

    def column(name: str, kind: str, numpy_type: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}

    header = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    description = {
        "index_columns": ["task"],
        "column_indexes": [{**header, "metadata": {"encoding": "UTF-8"}}],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
        "pandas_version": "2.0.0",
    }
    return {b"pandas": json.dumps(description).encode()}


def next_file(chunk: int, file: int) -> tuple[int, int]:
    """Chunk and file index after `(chunk, file)`."""
    return (chunk, file + 1) if file + 1 < FILES_PER_CHUNK else (chunk + 1, 0)


def to_frames(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images `(T, 3, height, width)` as contiguous frames `(T, height, width, 3)`."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
