"""Checked access to HDF5 files: own content only, real numbers, and sizes that the file can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.data.episodes import Array
from robopolicy.data.formats.foreign import MAX_TEXT, check_real, check_size, foreign_errors
from robopolicy.errors import UserError
from robopolicy.optional import require

SUFFIXES = (".hdf5", ".h5", ".hdf")
_MAX_LINKS = 16  # soft links on the way to a member
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG"


class Hdf5File:
    """HDF5 file that is read safely.

    Raises:
        UserError: The file is missing, or is no HDF5 file.
    """

    def __init__(self, path: Path) -> None:
        self._h5py = require("h5py", "hdf5")
        if not path.is_file():
            raise UserError(f"No file at {path}.")
        if not self._h5py.is_hdf5(path):
            raise UserError(f"{path} is no HDF5 file, or its header is damaged.")
        self.path, self._size = path, path.stat().st_size
        with foreign_errors(path):
            self.root = self._h5py.File(path, "r")

    def close(self) -> None:
        """Close the file."""
        self.root.close()

    def child(self, group: Any, name: str) -> Any:
        """Return the member `name` of a group, or None; names may be paths.

        Raises:
            UserError: It is a link to another file, also by way of soft links.
        """
        parts, links = _parts(name), 0
        while parts and isinstance(group, self._h5py.Group):
            part = parts.pop(0)
            link = group.get(part, getlink=True)
            if isinstance(link, self._h5py.ExternalLink):
                raise UserError(f"'{part}' of {group.name} links to another file; copy its content into this one.")
            if isinstance(link, self._h5py.SoftLink):
                links += 1
                if links > _MAX_LINKS:
                    raise UserError(f"The way to '{name}' has more than {_MAX_LINKS} soft links, or a circle of them.")
                parts = _parts(link.path) + parts
                group = self.root if link.path.startswith("/") else group
            else:
                group = group.get(part)
        return None if parts else group

    def group(self, parent: Any, name: str) -> Any:
        """Return the subgroup `name`; raises a `UserError` if it is missing or an array."""
        found = self.child(parent, name)
        if not isinstance(found, self._h5py.Group):
            what = "is missing" if found is None else "must be a group, found an array"
            raise UserError(f"'{name}' of {parent.name} {what}.")
        return found

    def is_array(self, member: Any) -> bool:
        """Whether a member is a dataset of HDF5."""
        return isinstance(member, self._h5py.Dataset)

    def arrays(self, group: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield all arrays below a group with their paths."""
        if depth > 8:
            raise UserError(f"{group.name} is nested too deeply.")
        for name in group:
            member = self.child(group, name)
            if isinstance(member, self._h5py.Group):
                yield from self.arrays(member, f"{prefix}{name}/", depth + 1)
            elif member is not None:
                yield prefix + name, member

    def checked(self, array: Any) -> Any:
        """Return a dataset of HDF5 whose numbers can be read.

        Raises:
            UserError: It is a group, holds other values than real numbers, lies in another file, or declares more than
                the file can hold.
        """
        if not self.is_array(array):
            raise UserError(f"{array.name} must be an array, found a group.")
        self.check_storage(array)
        check_real(array.name, array.dtype)
        return array

    def read(self, array: Any) -> Array | list[bytes]:
        """Read an array of real numbers, or the bytes of PNG or JPEG images in rows of bytes."""
        if not self.is_array(array):
            raise UserError(f"{array.name} must be an array, found a group.")
        if self._h5py.check_vlen_dtype(array.dtype) == np.uint8 and array.ndim == 1:
            self.check_storage(array)
            return _images(array.name, [row.tobytes() for row in array[()]])
        values = np.asarray(self.checked(array)[()])
        if values.dtype == np.uint8 and values.ndim == 2 and values[:1].tobytes().startswith((_JPEG, _PNG)):
            return _images(array.name, [row.tobytes() for row in values])  # images with as many bytes each
        return values

    def text(self, owner: Any, name: str) -> str:
        """Return the text of an attribute; empty if there is none."""
        value = owner.attrs.get(name)
        if isinstance(value, bytes):
            value = value.decode()
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise UserError(f"Attribute '{name}' of {owner.name} has {len(value)} characters.")
        return value if isinstance(value, str) else ""

    def check_storage(self, array: Any) -> None:
        """Raise a `UserError` if an array lies in another file, or declares more than this one can hold."""
        if array.external or array.is_virtual:
            raise UserError(f"{array.name} lies in another file; copy its content into this one.")
        if array.shape is None:
            raise UserError(f"{array.name} is empty.")
        check_size(array.name, array.size * array.dtype.itemsize, self._size)
        chunk = math.prod(array.chunks or (0,)) * array.dtype.itemsize
        check_size(f"a chunk of {array.name}", chunk, self._size)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _images(name: str, rows: list[bytes]) -> list[bytes]:
    for index, row in enumerate(rows):
        if not row.startswith((_JPEG, _PNG)):
            raise UserError(f"Row {index} of {name} is no JPEG or PNG image.")
    return rows


def length(values: Any) -> int:
    """Number of rows of an array; 0 of a scalar."""
    return int(values.shape[0]) if values.ndim else 0
