"""Checks of everything that foreign files hold: errors of one line, sizes, numbers and images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.data.episodes import Array
from robopolicy.errors import UserError
from robopolicy.files import parse_json

MAX_EXPANSION, SMALL_BYTES = 2000, 2**24  # of declared bytes to bytes of the file, beyond so many bytes
MAX_TEXT = 2**26  # bytes of a text, e.g. of metadata
MIN_PIXELS = 16  # of the sides of an image that is stored as floating-point numbers


@contextmanager
def foreign_errors(path: Path) -> Iterator[None]:
    """Convert every error of reading the foreign dataset `path` to a `UserError` of one line that names it."""
    try:
        yield
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # decoders of foreign libraries raise errors of any type
        reason = " ".join((str(error) or type(error).__name__).split()).rstrip(".")
        raise UserError(f"Cannot read {path}: {reason}.") from error


def check_size(name: str, nbytes: int, available: int) -> None:
    """Raise a `UserError` if the array `name` declares more bytes than a file of `available` bytes can hold."""
    if nbytes > max(SMALL_BYTES, MAX_EXPANSION * available):
        raise UserError(f"'{name}' declares {nbytes} bytes in a file of {available} bytes.")


def check_real(name: str, dtype: np.dtype[Any]) -> None:
    """Raise a `UserError` unless arrays of `dtype` hold real numbers of at most eight bytes."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UserError(f"'{name}' holds {dtype}, expected real numbers.")


def native(array: Array) -> Array:
    """Return `array` in the byte order of the machine."""
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def as_images(array: Array) -> Array | None:
    """Return images `(T, 3, height, width)` uint8 if `array` holds RGB images, else None.

    Images are uint8 `(T, height, width, 3)` or `(T, 3, height, width)`, or whole numbers from 0 to 255 stored as floats
    `(T, height, width, 3)`.
    """
    if array.ndim != 4:
        return None
    if array.dtype == np.uint8:
        if array.shape[3] == 3:
            return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
        return array if array.shape[1] == 3 else None
    if array.dtype.kind != "f" or array.shape[3] != 3 or min(array.shape[1:3]) < MIN_PIXELS:
        return None
    pixels = np.nan_to_num(array, nan=-1, posinf=-1, neginf=-1).clip(-1, 256).astype(np.int16)
    if not np.array_equal(pixels, array) or pixels.min() < 0 or pixels.max() > 255:
        return None
    return np.ascontiguousarray(pixels.astype(np.uint8).transpose(0, 3, 1, 2))


def json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object named `what` in messages."""
    if len(text) > MAX_TEXT:
        raise UserError(f"{what} has {len(text)} bytes, at most {MAX_TEXT} are read.")
    try:
        found = parse_json(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise UserError(f"{what} is not JSON: {' '.join(str(error).split())[:80]}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{what} must be a JSON object, found {json.dumps(found)[:40]}.")
    return found


def find_text(data: Mapping[str, Any], *path: str) -> str:
    """Return the text at a path of nested objects; empty if there is none."""
    value: Any = data
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def find_number(data: Mapping[str, Any], *path: str) -> float:
    """Return the positive finite number at a path of nested objects; 0 if there is none."""
    value: Any = data
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 < value < 1e9 else 0.0
