"""Atomic writing of files and folders.

A file or folder is written under a hidden sibling name that contains the process id, so that concurrent writers do not
mix. A killed process leaves its sibling behind; the next process that writes the folder deletes it. A symbolic link
is kept: its target is replaced and may be on another disk.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from robopolicy.errors import UserError, cannot_write

try:
    from yaml import CSafeLoader as SafeLoader  # libyaml is five times faster
except ImportError:  # PyYAML was built without it
    from yaml import SafeLoader

_TOO_DEEP = "it is nested too deeply"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, renamed to `path` on success and deleted on failure; raises a UserError if writing fails."""
    try:
        temporary = fresh_folder(path)
        try:
            yield temporary
            atomic_replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from error


def fresh_folder(path: Path) -> Path:
    """Create the empty folder in which this process prepares `path`, for `atomic_replace`."""
    restore_partial(path)
    folder = _sibling(path)
    for left in _stale_folders(path):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def atomic_replace(folder: Path, path: Path) -> None:
    """Rename a complete `folder` to its final name `path`.

    An existing folder at `path` is renamed first and deleted last, so that the old or the new folder exists in full
    at every instant; `restore_partial` restores the old one after a crash between the two renames.
    """
    _sync(folder)
    path = _real(path)
    try:
        if path.exists():
            path.rename(_previous(path))
        folder.rename(path)
    finally:
        restore_partial(path)


def restore_partial(path: Path) -> None:
    """Finish or undo a replacement of `path` that a crash interrupted."""
    path, previous = _real(path), _previous(path)
    if not os.path.exists(previous):  # unlike Path.exists, without an error if the parent is not searchable
        return
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
    else:
        previous.rename(path)


def check_owned(path: Path, marker: str, what: str) -> None:
    """Raise a UserError if `path` is a non-empty folder without our file `marker`.

    `what` is the kind of folder with an article, for the message.
    """
    if _taken(path) and not (path / marker).is_file():
        raise UserError(f"{path} exists and is not {what}; choose another folder.")


def check_new_folder(
    path: Path, what: str, *markers: str, overwrite: bool = False, sources: Iterable[Path] = ()
) -> None:
    """Check the path of an output folder before any work is done; an empty folder may be replaced.

    Args:
        path: Folder to write.
        what: Kind of folder with an article, for the message.
        markers: Files that identify our own folders; one is enough.
        overwrite: Replace an existing folder of ours.
        sources: Inputs of the folder, which are never replaced.

    Raises:
        UserError: The path exists and may not be replaced, or cannot be written.
    """
    check_writable(path)
    restore_partial(path)
    if not _taken(path):
        return
    if not any((path / marker).is_file() for marker in markers):
        raise UserError(f"{path} exists and is not {what}; choose another folder.")
    if not overwrite:
        raise UserError(f"{path} exists already; choose another folder, or pass --overwrite to replace it.")
    for source in sources:
        if source.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{path} is the input {source} of this command; choose another folder.")


def check_new_file(path: Path, *suffixes: str, overwrite: bool = False, option: str = "--out") -> None:
    """Check the path of an output file, given by `option`, before any work is done.

    Raises:
        UserError: The suffix is not in `suffixes`, the file exists, or the path cannot be written.
    """
    check_writable(path)
    if path.is_dir():
        raise cannot_write(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{option} must end in {' or '.join(suffixes)}, got {path}.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already; choose another file, or pass --overwrite to replace it.")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the suffix of `path`; on success the file replaces `path` in one step.

    Parent folders are created. A UserError is raised if writing fails.
    """
    temporary = _sibling(path)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(_real(path))
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):  # the path may not be a folder
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON; a ValueError is raised for invalid text, deep nesting and numbers with too many digits."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: The text is invalid, nested too deeply or repeats a key, or a value does not fit its tag; one line.
    """
    try:
        loader = _YamlLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except (ValueError, yaml.YAMLError) as error:
        deep = "maximum nesting depth" in str(error)  # message of libyaml
        raise ValueError(_TOO_DEEP if deep else " ".join(str(error).split())) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # raised by PyYAML, e.g. for `!!int ""`
        raise ValueError("a value does not fit its tag") from error


class _YamlLoader(SafeLoader):  # type: ignore[misc]
    """Safe loader that rejects repeated keys; YAML silently uses the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"found '{key.value}' twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _named(path: Path) -> Path:
    """Return the same path with a final component, which `.` lacks."""
    return path if path.name else path.absolute()


def _real(path: Path) -> Path:
    """Return the target of `path` if it is a link, existing or not, so that the link is kept."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else _named(path)


def _sibling(path: Path, writer: int | str | None = None) -> Path:
    # Encoders choose their format by the suffix, so it is kept.
    path = _real(path)
    return path.with_name(f".{path.stem}.writing-{writer or os.getpid()}{path.suffix}")


def _stale_folders(path: Path) -> list[Path]:
    """Return the folders for `path` left by processes that no longer exist."""
    pattern = re.escape(_sibling(path, "PID").name).replace("PID", r"(\d+)")
    parent = _real(path).parent
    named = [(re.fullmatch(pattern, entry.name), entry) for entry in parent.iterdir()] if parent.is_dir() else []
    return [entry for match, entry in named if match and entry.is_dir() and not _is_alive(int(match[1]))]


def _is_alive(process: int) -> bool:
    """Whether a process with this id exists, of any user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _previous(path: Path) -> Path:
    path = _real(path)
    return path.with_name(f".{path.name}.previous") if path.name else path / ".previous"


def _sync(folder: Path) -> None:
    """Flush files and directory entries to disk, so that they are complete after a power failure."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def next_free_path(place: Path) -> Path:
    """Return `place` if it does not exist, else the first free path of NAME_2, NAME_3, ...; the suffix is kept."""
    number = 1
    free = place = _named(place)
    while free.exists():
        number += 1
        free = place.with_name(f"{place.stem}_{number}{place.suffix}")
    return free


def _taken(path: Path) -> bool:
    """Whether the path exists and is not an empty folder."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def check_writable(path: Path) -> None:
    """Raise a UserError for a path below a file or in a folder without write permission."""
    folder = next((parent for parent in _real(path).absolute().parents if parent.exists()), path)
    if not folder.is_dir():
        raise cannot_write(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise cannot_write(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
