"""What the metadata of a dataset has to look like, said in words where it does not."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pyarrow as pa
from PIL import Image

from robopolicy.errors import UserError

MOST_FPS = 10_000
_LIBRARY_ERRORS = (pa.ArrowException, av.FFmpegError, Image.DecompressionBombError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn everything that a damaged file can cause into one clear line.

    Raises:
        UserError: `path` cannot be read.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, TypeError, LookupError, OverflowError, AttributeError, *_LIBRARY_ERRORS) as error:
        raise UserError(f"Cannot read {path}: {_reason(error)}; copy or collect the dataset again.") from error


def _reason(error: Exception) -> str:
    """What is wrong, for people who do not know the code."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON ({error})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TypeError | LookupError | AttributeError):
        return "its entries are not those of a LeRobot dataset"
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def check_info(info: Any) -> dict[str, Any]:
    """The content of `meta/info.json`, if it is one.

    Raises:
        ValueError: An entry is missing, or is of the wrong kind.
    """
    if not isinstance(info, dict):
        raise ValueError("it must be an object with entries")
    check_entries(info, ("codebase_version", "fps", "features", "data_path"))
    fps = info["fps"]
    if not _is_number(fps) or not 1 / MOST_FPS <= fps <= MOST_FPS:
        raise ValueError(f"'fps' must be a number from {1 / MOST_FPS:g} to {MOST_FPS}, found {_shown(fps)}")
    if not isinstance(info["features"], dict):
        raise ValueError(f"'features' must be an object by name, found {_shown(info['features'])}")
    for name, feature in info["features"].items():
        _check_feature(name, feature)
    filmed = any(feature["dtype"] == "video" for feature in info["features"].values())
    for key in ("data_path", "video_path") if filmed else ("data_path",):
        _check_template(key, info.get(key))
    return info


def check_entries(found: Iterable[str], wanted: Iterable[str], what: str = "entry") -> None:
    """Refuse what lacks an entry.

    Raises:
        ValueError: It does.
    """
    present = set(found)
    for name in wanted:
        if name not in present:
            raise ValueError(f"{what} '{name}' is missing")


def whole(entry: Mapping[str, Any], name: str, least: int = 0) -> int:
    """A whole number of a row of metadata.

    Raises:
        ValueError: It is missing or none, or too small.
    """
    check_entries(entry, (name,))
    value = entry[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ValueError(f"'{name}' must be a whole number of {least} or more, found {_shown(value)}")
    return value


def _check_feature(name: str, feature: Any) -> None:
    if not isinstance(feature, dict):
        raise ValueError(f"feature '{name}' must be an object, found {_shown(feature)}")
    check_entries(feature, ("dtype", "shape"), f"feature '{name}': entry")
    dtype, shape = feature["dtype"], feature["shape"]
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of feature '{name}' must be a name such as float32, found {_shown(dtype)}")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"the shape of feature '{name}' must be a list of sizes of 1 or more, found {_shown(shape)}")
    if dtype in ("image", "video") and len(shape) != 3:
        raise ValueError(f"the shape of camera '{name}' must be three sizes, found {_shown(shape)}")


def _check_template(key: str, template: Any) -> None:
    """Refuse places of files that name something else than an episode's place."""
    known = ("chunk_index", "file_index", "episode_chunk", "episode_index", "video_key")
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except (TypeError, ValueError):
        fields = [""]
    if not set(fields) <= set(known):
        raise ValueError(f"'{key}' must be the place of a file such as data/file-{{file_index}}.parquet")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]} ..."
