"""Content hashes of files and versions of packages, recorded with every result."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from robopolicy.errors import UserError

PACKAGES = ("robopolicy", "torch", "numpy", "mujoco")  # packages with the largest effect on results


def sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file; an unreadable file raises a UserError."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy it again.") from error


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed `packages`."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
