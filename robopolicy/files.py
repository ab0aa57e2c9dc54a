"""Checks of output paths before any work is done, and strict JSON and YAML."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from robopolicy.atomic import resolve_link, restore_partial
from robopolicy.errors import UserError, cannot_write

try:
    from yaml import CSafeLoader as SafeLoader  # libyaml is five times faster
except ImportError:  # PyYAML was built without it
    from yaml import SafeLoader

_TOO_DEEP = "it is nested too deeply"
_MAX_ALIASED = 100_000  # values of a YAML file with aliases


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


def parse_json(text: str) -> Any:
    """Parse JSON; a ValueError is raised for invalid text, deep nesting and numbers with too many digits."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: The text is invalid, nested too deeply, repeats a key or contains too much by aliases, or a value
            does not fit its tag; one line.
    """
    try:
        loader = _YamlLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_aliases(node)
            return loader.construct_document(node)
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


def _check_aliases(root: yaml.Node) -> None:
    """Raise a ValueError if aliases refer to a value that contains them, or repeat very many values."""
    sizes: dict[int, int] = {}  # number of values in a node with all aliases replaced; 0 while it is computed

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0
            pairs: Any = node.value if isinstance(node, yaml.MappingNode) else ()
            parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in pairs for part in pair]
            sizes[id(node)] = 1 + sum(map(size, parts))
        elif not sizes[id(node)]:
            raise ValueError("an alias refers to a value that contains it")
        return sizes[id(node)]

    if size(root) > max(len(sizes), _MAX_ALIASED):
        raise ValueError(f"its aliases repeat more than {_MAX_ALIASED:,} values")


def next_free_path(place: Path) -> Path:
    """Return `place` if it does not exist, else the first free path of NAME_2, NAME_3, ...; the suffix is kept."""
    number = 1
    free = place = place if place.name else place.absolute()
    while free.exists():
        number += 1
        free = place.with_name(f"{place.stem}_{number}{place.suffix}")
    return free


def _taken(path: Path) -> bool:
    """Whether the path exists and is not an empty folder."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def check_writable(path: Path) -> None:
    """Raise a UserError for a path below a file or in a folder without write permission."""
    folder = next((parent for parent in resolve_link(path).absolute().parents if parent.exists()), path)
    if not folder.is_dir():
        raise cannot_write(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise cannot_write(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
