"""Content hashes of files and versions of packages, recorded with every result."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from robopolicy.errors import UserError

PACKAGES = ("robopolicy", "torch", "numpy", "mujoco")  # most results depend on these


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file.

    Raises:
        UserError: It cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy it again.") from error


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of those of `packages` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
