"""Atomic writing of files and folders.

A file or folder is written under a hidden sibling name with the host and process id of its writer, and then takes its
name in one step: readers see the old or the new content in full at every instant. A lock lets only one process write
a folder; the second gets an error. A killed process leaves its siblings behind; the next writer deletes them. A
symbolic link is kept: its target is replaced and may be on another disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from robopolicy.errors import UserError, cannot_write

T = TypeVar("T")
MAX_READS, WAIT = 100, 0.001  # attempts to read a folder that is replaced meanwhile, and seconds between some
_HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname()) or "host"
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}  # of file systems without it


class FolderWriter:
    """Writer of one folder: fill `folder`, then `publish` or `discard` it."""

    def __init__(self, path: Path) -> None:
        """Create the empty folder in which this process prepares `path`.

        Raises:
            UserError: Another process writes the same folder.
            OSError: The folder cannot be created.
        """
        restore_partial(path)
        self.path = resolve_link(path)
        self.folder = sibling(path)
        self._created = _missing_parents(self.folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        try:
            _delete(*_left_by_dead(self.path, "writing"), self.folder)
            self.folder.mkdir()
        except BaseException:
            self._unlock()
            raise

    def publish(self) -> None:
        """Give the complete folder its final name; an older folder of this name is deleted."""
        try:
            _sync(self.folder)
            if not _exchange(self.folder, self.path):
                _replace(self.folder, self.path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Delete what was not published, with the folders above it. Repeated calls have no effect."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()
        with suppress(OSError):  # they are not empty
            for parent in self._created:
                parent.rmdir()
        self._created = []

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                _lock_file(self.path).unlink()  # while it is locked, see `_lock`
            os.close(lock)


def _missing_parents(path: Path) -> list[Path]:
    """Return the parents that do not exist, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, renamed to `path` on success and deleted on failure; raises a UserError if writing fails."""
    try:
        writer = FolderWriter(path)
        try:
            yield writer.folder
            writer.publish()
        except UserError as error:  # of a nested writer, which knows only the hidden name
            if (hidden := str(writer.folder)) not in str(error):
                raise
            raise UserError(str(error).replace(hidden, str(path))) from error
        finally:
            writer.discard()
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error


def restore_partial(path: Path) -> None:
    """Finish or undo a replacement of `path` that a dead process left; a living writer is left alone.

    Only on file systems without an atomic exchange is there a moment between two renames, with a sibling as old folder.
    """
    path = resolve_link(path)
    for previous in _left_by_dead(path, "previous"):
        if os.path.exists(path):  # unlike Path.exists, without an error if the parent is not searchable
            _delete(previous)
        else:
            with suppress(OSError):  # a new folder has appeared
                previous.rename(path)


def read_stable(folder: Path, read: Callable[[], T]) -> T:
    """Return `read()` of a folder that other processes may replace meanwhile: of one version, old or new.

    `read` is repeated if the folder was replaced while it ran, also after an error.
    """
    if "\0" in str(folder):
        raise UserError(f"The path {str(folder)!r} contains a NUL character; choose another folder.")
    restore_partial(folder)
    for _ in range(MAX_READS):
        before = _identity(folder)
        try:
            result = read()
            if _identity(folder) == before:
                return result
        except (UserError, OSError):
            if before is None and _is_replaced(folder):
                time.sleep(WAIT)
            elif _identity(folder) == before:
                raise
    raise UserError(f"{folder} is replaced faster than it can be read; copy it and read the copy.")


def _is_replaced(folder: Path) -> bool:
    """Whether a writer is between its two renames, or has just been."""
    folder = resolve_link(folder)
    return folder.exists() or any(folder.parent.glob(f".{glob.escape(folder.stem)}.previous-*"))


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the suffix of `path`; on success the file replaces `path` in one step.

    Parent folders are created. A UserError is raised if writing fails.
    """
    temporary = sibling(path)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        _delete(*_left_by_dead(resolve_link(path), "writing"))
        yield temporary
        _sync_file(temporary)
        temporary.replace(resolve_link(path))
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):  # the path may not be a folder
            temporary.unlink(missing_ok=True)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty hidden folder next to `path`, which is deleted in the end; if its process dies, by the next."""
    folder = sibling(path, "scratch")
    _delete(*_left_by_dead(resolve_link(path), "scratch"), folder)
    try:
        folder.mkdir()
        yield folder
    finally:
        _delete(folder)


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def create_text(path: Path, text: str) -> None:
    """Create a text file in one step; a FileExistsError is raised if it exists, another OSError if writing fails."""
    temporary = sibling(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        _sync_file(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            with path.open("x", encoding="utf-8") as stream:
                stream.write(text)
    finally:
        temporary.unlink(missing_ok=True)


def resolve_link(path: Path) -> Path:
    """Return the target of `path` if it is a link, existing or not; other paths get a final component, unlike `.`."""
    if os.path.islink(path):
        return Path(os.path.realpath(path))
    return path if path.name else path.absolute()


def sibling(path: Path, kind: str = "writing") -> Path:
    """Return the hidden name next to `path` that belongs to this process; encoders use the suffix, so it stays."""
    path = resolve_link(path)
    return path.with_name(f".{path.stem}.{kind}-{_HOST}-{os.getpid()}{path.suffix}")


def _left_by_dead(path: Path, kind: str) -> list[Path]:
    """Return the hidden files and folders next to `path` of processes of this host that no longer exist."""
    start, end = f".{path.stem}.{kind}-{_HOST}-", path.suffix
    try:
        names = [name for name in os.listdir(path.parent) if name.startswith(start)]
    except OSError:
        return []
    named = [(name.removeprefix(start).removesuffix(end), name) for name in names]
    return [path.parent / name for writer, name in named if writer.isdecimal() and not _is_alive(int(writer))]


def _delete(*paths: Path) -> None:
    """Delete files and folders, as far as they exist and the system permits it."""
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_alive(process: int) -> bool:
    """Whether a process with this id exists, of any user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _lock(path: Path) -> int | None:
    """Lock the folder `path` for its writer; None on file systems without locks.

    The file is deleted while it is locked, so a lock on a deleted file is no lock, and is tried again.
    """
    file = _lock_file(path)
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(file) and os.path.samestat(os.fstat(lock), os.stat(file)):
                return lock
        except BlockingIOError:
            os.close(lock)
            text = "is being written by another process; wait for it or choose another path"
            raise UserError(f"{path} {text}.") from None
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        os.close(lock)


def _exchange(folder: Path, path: Path) -> bool:
    """Exchange two folders in one step; return False if `path` does not exist or the system cannot do it."""
    library, first, second = ctypes.CDLL(None, use_errno=True), os.fsencode(folder), os.fsencode(path)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)
    elif hasattr(library, "renamex_np"):  # macOS
        failed = library.renamex_np(first, second, _RENAME_SWAP)
    else:
        return False
    number = ctypes.get_errno() if failed else 0
    if number in _NO_EXCHANGE | {errno.ENOENT}:
        return False
    if number:
        raise OSError(number, os.strerror(number), str(path))
    return True


def _replace(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; an older folder of this name is a sibling in between."""
    previous = sibling(path, "previous")
    try:
        if path.exists():
            path.rename(previous)
        folder.rename(path)
    except OSError:
        if previous.exists() and not path.exists():
            previous.rename(path)
        raise
    finally:
        shutil.rmtree(previous, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush files and directory entries to disk, so that they are complete after a power failure."""
    for path in [*folder.rglob("*"), folder]:
        _sync_file(path)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
