"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from robopolicy.errors import cannot_write


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success it takes the name `path`, on failure nothing remains of it.

    A folder already at `path` is moved aside first and deleted last, so that at every instant either the old or the
    new one exists in full; `recover` puts the old one back when a crash fell between the two renames.

    Raises:
        UserError: The disk is full or the place cannot be written.
    """
    temporary, previous = _sibling(path, "writing"), _sibling(path, "previous")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        if path.exists():
            path.rename(previous)
        temporary.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        recover(path)


def recover(path: Path) -> None:
    """Finish or undo a replacement of `path` that a crash interrupted."""
    previous = _sibling(path, "previous")
    if not os.path.exists(previous):  # unlike Path.exists, quiet where the parent may not be searched
        return
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
    else:
        previous.rename(path)


def _sync(folder: Path) -> None:
    """Push files and directory entries to the disk, so that a power cut after the rename finds them whole."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
