"""Registries of algorithms, policies, tasks and other components by name, imported on first use.

A name is looked up in three places, in this order:

1. the product's own table;
2. `robopolicy/contrib/<theme>/theme.toml`, one table per kind, read as data;
3. entry points of installed packages, group `robopolicy.<kind>`, under the names of the entry points.

All three give an object as "module:attribute", so listing names imports nothing.
"""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from robopolicy.errors import UserError

CONTRIB = Path(__file__).resolve().parent / "contrib"
PRODUCT = "product"

T = TypeVar("T")


@dataclass(frozen=True)
class Theme:
    """A folder of `robopolicy/contrib`."""

    name: str
    folder: Path
    tables: Mapping[str, Any]  # content of its theme.toml


@cache
def themes() -> dict[str, Theme]:
    """Return the themes of `robopolicy/contrib` by name; reads each `theme.toml` and imports nothing."""
    files = sorted(CONTRIB.glob("*/theme.toml"))
    return {file.parent.name: Theme(file.parent.name, file.parent, tomllib.loads(file.read_text())) for file in files}


def contributed(kind: str) -> dict[str, tuple[str, Any]]:
    """Return (theme, row) by name for one kind of object; a ValueError is raised if two themes use one name."""
    found: dict[str, tuple[str, Any]] = {}
    for theme in themes().values():
        table: Any = theme.tables
        for key in kind.split("."):
            table = table.get(key, {})
        for name, row in table.items():
            if name in found:
                raise ValueError(f"{kind} '{name}' is defined by the themes {found[name][0]} and {theme.name}.")
            found[name] = theme.name, row
    return found


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of the group `robopolicy.<kind>` by name, without importing them."""
    return {point.name: point for point in _entry_points().select(group=f"robopolicy.{kind}")}


@cache
def _entry_points() -> Any:  # EntryPoints; in Python 3.11 a dict with the same `select`; reading it takes 0.1 s
    return entry_points()


def load(target: str) -> Any:
    """Import the object at "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_entry_point(point: EntryPoint) -> Any:
    """Import the object of an entry point; a failure raises a UserError that names the entry point."""
    try:
        return point.load()
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        where = f"{point.name} = {point.value} of {point.group}"
        raise UserError(f"{where} failed: {reason}; fix or uninstall that package.") from error


class Registry(Mapping[str, T], Generic[T]):
    """Objects of one kind by name, from the product, contrib and installed packages.

    Looking up a name imports the module that defines it. Iterating yields names and imports nothing.
    """

    def __init__(self, kind: str, rows: Mapping[str, T | str], read: Callable[[Any], T] | None = None) -> None:
        """Create a registry.

        Args:
            kind: Table of `theme.toml` and group of entry points, e.g. "algorithms".
            rows: Objects of the product by name: the object or "module:attribute".
            read: Converts a row of `theme.toml` to an object, for kinds whose rows are tables.
        """
        self.kind = kind
        self._read = read
        self._rows: dict[str, Any] = dict(rows)

    def register(self, name: str, row: T | str) -> None:
        """Add an object or its "module:attribute" under a name; a ValueError is raised if the name is in use."""
        if name in self:
            raise ValueError(f"{self.kind} '{name}' is already registered.")
        self._rows[name] = row

    def ring(self, name: str) -> str:
        """Return the origin of a name: "product", a theme of contrib, or an installed package."""
        if name in self._rows:
            return PRODUCT
        if name in (found := contributed(self.kind)):
            return found[name][0]
        point = installed(self.kind)[name]
        return point.dist.name if point.dist else point.value

    def product(self) -> list[str]:
        """Return the sorted names of the product, without contrib and plugins."""
        return sorted(self._rows)

    def summary(self, name: str) -> str:
        """Return the first line of an object's docstring, without importing it where possible."""
        row: Any = self._row(name)
        return summary(row) if isinstance(row, str) else _first_line(row.__doc__)

    def attribute(self, name: str, attribute: str) -> Any:
        """Return an attribute of an object, without importing it where possible; see `class_attribute`."""
        row: Any = self._row(name)
        return class_attribute(row, attribute) if isinstance(row, str) else getattr(row, attribute)

    def _row(self, name: str) -> Any:
        if name in self._rows:
            return self._rows[name]
        if name in (found := contributed(self.kind)):
            row = found[name][1]
            return self._read(row) if self._read is not None else row
        return load_entry_point(installed(self.kind)[name])

    def __getitem__(self, name: str) -> T:
        row = self._row(name)
        return load(row) if isinstance(row, str) else row

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._rows, *contributed(self.kind), *installed(self.kind)}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in contributed(self.kind) or name in installed(self.kind)


def summary(target: str) -> str:
    """Return the first docstring line of the object at "module:attribute", without importing its module."""
    module, _, attribute = target.partition(":")
    return _first_line(ast.get_docstring(_definition(module, attribute)))


def class_attribute(target: str, attribute: str) -> Any:
    """Return a constant that the class at "module:attribute" or its nearest base sets, without importing its module.

    A ValueError is raised if none of them sets it to a constant.
    """
    module, _, name = target.partition(":")
    for value in _assignments(module, name, attribute):
        return ast.literal_eval(value)
    raise ValueError(f"{target} and its bases set no constant '{attribute}'.")


def _assignments(module: str, name: str, attribute: str) -> Iterator[ast.expr]:
    """Yield the values that a class and its bases assign to an attribute, nearest first, bases from left to right."""
    node = _definition(module, name)
    for line in node.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if any(isinstance(each, ast.Name) and each.id == attribute for each in targets):
                yield line.value
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        found = base.value if isinstance(base, ast.Subscript) else base  # the class of a generic base
        if isinstance(found, ast.Name) and (place := _origin(module, found.id)) is not None:
            yield from _assignments(*place, attribute)


def _origin(module: str, name: str) -> tuple[str, str] | None:
    """Return module and name of a class of this project that a module defines or imports by `from`; else None."""
    for node in _syntax_tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, name
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("robopolicy"):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return node.module, alias.name
    return None


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in _syntax_tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"{module} defines no class or function '{name}'.")


@cache
def _syntax_tree(module: str) -> ast.Module:
    """Parse a module without importing it; its parent packages are imported."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"There is no module '{module}'.")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n")[0]
