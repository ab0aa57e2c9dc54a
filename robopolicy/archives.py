"""Checks of foreign archives before their content is read: sizes, compression and array headers.

A zip file of a few MB can describe many GB, and is refused from its index alone. Bundles need only numpy for it.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

MAX_BYTES = 2**30  # of all members of an archive
MAX_RATIO, SMALL_BYTES = 200, 2**24  # of the size of a member to its compressed size, beyond so many bytes
DATASET_BYTES, DEFLATE_RATIO = 2**36, 1100  # limits for datasets: they are large, and deflate compresses no better
DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(LookupError, TypeError, SyntaxError, OverflowError, MemoryError),
)
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@contextmanager
def zip_errors() -> Iterator[None]:
    """Convert the many errors of damaged archives to a `ValueError` of one line."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except DAMAGES as error:
        raise ValueError((str(error) or type(error).__name__).splitlines()[0]) from error


def open_zip(source: Path | IO[bytes], max_bytes: int = MAX_BYTES, max_ratio: int = MAX_RATIO) -> zipfile.ZipFile:
    """Open a zip file whose members are neither encrypted nor larger than expected.

    Raises:
        ValueError: It is damaged, encrypted, compressed in another way, or too large, or a name occurs twice or leaves
            the archive; one line.
        OSError: It cannot be read.
    """
    with zip_errors():
        archive = zipfile.ZipFile(source)
    try:
        total, names = 0, set[str]()
        for member in archive.infolist():
            name = member.filename[:60]
            if member.filename in names:
                raise ValueError(f"member '{name}' occurs twice")
            if member.filename.startswith("/") or ".." in member.filename.split("/"):
                raise ValueError(f"member '{name}' lies outside of the archive")
            names.add(member.filename)
            if member.flag_bits & 0x1:
                raise ValueError(f"member '{name}' is encrypted")
            if member.compress_type not in COMPRESSIONS:
                raise ValueError(f"member '{name}' has the unknown compression {member.compress_type}")
            if member.file_size > max(SMALL_BYTES, max_ratio * member.compress_size):
                raise ValueError(f"member '{name}' of {member.compress_size} bytes expands to {member.file_size}")
            total += member.file_size
        if total > max_bytes:
            raise ValueError(f"its members have {total} bytes, at most {max_bytes} are read")
    except BaseException:
        archive.close()
        raise
    return archive


def read_arrays(path: Path, max_bytes: int = MAX_BYTES, max_ratio: int = MAX_RATIO) -> dict[str, NDArray[Any]]:
    """Read an `.npz` file of numbers; the size of every array is checked against the size of its member.

    Args:
        path: File.
        max_bytes: Maximum number of bytes of all arrays.
        max_ratio: Maximum ratio of the bytes of an array to its compressed bytes.

    Raises:
        ValueError: The archive or an array is damaged, too large, or holds other values than numbers; one line.
        OSError: It cannot be read.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with open_zip(path, max_bytes, max_ratio) as archive, zip_errors():
        for member in archive.infolist():
            with archive.open(member) as stream:
                name = member.filename.removesuffix(".npy")
                shape, fortran, dtype = _header(stream)
                if dtype.kind not in "biuf":
                    raise ValueError(f"array '{name[:60]}' holds {dtype}, expected real numbers")
                size = math.prod(shape) * dtype.itemsize
                if size > member.file_size:
                    raise ValueError(f"array '{name[:60]}' of {size} bytes has {member.file_size}")
                data = stream.read(size)
            if len(data) != size:
                raise ValueError(f"array '{name[:60]}' is truncated")
            array = np.frombuffer(data, dtype).reshape(shape[::-1] if fortran else shape)
            arrays[name] = (array.T if fortran else array).copy()
    return arrays


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    return readers[npy.read_magic(stream)](stream)
