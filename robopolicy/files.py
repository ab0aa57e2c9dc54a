"""Files and folders that appear complete or not at all.

A file or folder is written under a hidden sibling name with the process id, so that two writers never mix. A
process that is killed leaves that sibling behind; nothing reads it, and the next process that writes the folder
deletes it. A symbolic link stays: its target is replaced and may be on another disk.
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
    from yaml import CSafeLoader as SafeLoader  # libyaml is five times as fast
except ImportError:  # PyYAML was built without it
    from yaml import SafeLoader

_TOO_DEEP = "it is nested too deeply"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder; on success it is renamed to `path` (see `atomic_replace`), on failure it is deleted.

    Raises:
        UserError: The disk is full or the place cannot be written.
    """
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
    """Make the empty folder in which this process prepares `path`, for `atomic_replace`."""
    restore_partial(path)
    folder = _sibling(path)
    for left in _stale_folders(path):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def atomic_replace(folder: Path, path: Path) -> None:
    """Rename a complete `folder` to its final name `path`.

    A folder already at `path` is moved aside first and deleted last, so that at every instant either the old or the
    new one exists in full; `restore_partial` restores the old one after a crash between the two renames.
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
    if not os.path.exists(previous):  # unlike Path.exists, quiet where the parent may not be searched
        return
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
    else:
        previous.rename(path)


def check_owned(path: Path, marker: str, what: str) -> None:
    """Raise an error if `path` holds a folder that we did not write; an empty folder may be replaced.

    Args:
        path: Folder that is about to be written.
        marker: File that identifies our own folders.
        what: Name of the kind of folder, with an article.

    Raises:
        UserError: The path exists and lacks that file.
    """
    if _taken(path) and not (path / marker).is_file():
        raise UserError(f"{path} exists and is not {what}; choose another folder.")


def check_new_folder(
    path: Path, what: str, *markers: str, overwrite: bool = False, sources: Iterable[Path] = ()
) -> None:
    """Check the path of an output folder before any work is done; an empty folder may be replaced.

    Args:
        path: Folder to write.
        what: Name of the kind of folder, with an article.
        markers: Files that identify our own folders; one is enough.
        overwrite: Replace an existing folder of ours.
        sources: Inputs of the folder, which are never replaced.

    Raises:
        UserError: Something is there that may not be replaced, or the place cannot be written.
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
    """Check the path of an output file before any work is done.

    Args:
        path: File to write.
        suffixes: Accepted suffixes; empty accepts all.
        overwrite: Replace an existing file.
        option: Command-line option that gives the path.

    Raises:
        UserError: The name ends otherwise, something is there that may not be replaced, or the place cannot be written.
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
    """Yield a name with the suffix of `path` to write to; on success the file replaces `path` in one step.

    Parent folders are created.

    Raises:
        UserError: The disk is full or the place cannot be written.
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
    """Write or replace a text file in one step."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a number with too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        ValueError: The text is not YAML, is nested too deeply, repeats a key, or a value does not fit its tag; one
        line.
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
        deep = "maximum nesting depth" in str(error)  # of libyaml
        raise ValueError(_TOO_DEEP if deep else " ".join(str(error).split())) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # how PyYAML reads e.g. `!!int ""`
        raise ValueError("a value does not fit its tag") from error


class _YamlLoader(SafeLoader):  # type: ignore[misc]
    """Safe loader that refuses repeated keys, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"found '{key.value}' twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _named(path: Path) -> Path:
    """The same path with a final component, which `.` lacks."""
    return path if path.name else path.absolute()


def _real(path: Path) -> Path:
    """Target of `path` if it is a link, existing or not, so that the link remains."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else _named(path)


def _sibling(path: Path, writer: int | str | None = None) -> Path:
    # The suffix is kept, since encoders choose their format by it.
    path = _real(path)
    return path.with_name(f".{path.stem}.writing-{writer or os.getpid()}{path.suffix}")


def _stale_folders(path: Path) -> list[Path]:
    """Folders for `path` left by processes that no longer exist."""
    pattern = re.escape(_sibling(path, "PID").name).replace("PID", r"(\d+)")
    parent = _real(path).parent
    named = [(re.fullmatch(pattern, entry.name), entry) for entry in parent.iterdir()] if parent.is_dir() else []
    return [entry for match, entry in named if match and entry.is_dir() and not _is_alive(int(match[1]))]


def _is_alive(process: int) -> bool:
    """Whether a process with this id exists, whoever owns it."""
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
    """Flush files and directory entries to disk, so that they are complete after a power cut."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def next_free_path(place: Path) -> Path:
    """`place` if it does not exist, else the first free path of NAME_2, NAME_3, ...; the suffix is kept."""
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
    """Raise an error for a path below a file or in a folder without write permission.

    Raises:
        UserError: The path cannot be written.
    """
    folder = next((parent for parent in _real(path).absolute().parents if parent.exists()), path)
    if not folder.is_dir():
        raise cannot_write(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise cannot_write(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
