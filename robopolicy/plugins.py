"""Names of algorithms, policies, tasks and other parts, and the objects behind them, imported when they are used.

A name is looked up in three places, in this order:

1. the product's own table;
2. `robopolicy/contrib/<theme>/theme.toml`, one table per kind, read as data;
3. entry points of installed packages, group `robopolicy.<kind>`, whose names are the names of the things.

All three say where an object is as "module:attribute", so that listing names imports nothing.
"""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator, Mapping
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
    """One folder of `robopolicy/contrib`."""

    name: str
    folder: Path
    tables: Mapping[str, Any]  # content of its theme.toml


@cache
def themes() -> dict[str, Theme]:
    """The themes of `robopolicy/contrib` by name; reads their `theme.toml` and imports nothing."""
    files = sorted(CONTRIB.glob("*/theme.toml"))
    return {file.parent.name: Theme(file.parent.name, file.parent, tomllib.loads(file.read_text())) for file in files}


def contributed(kind: str) -> dict[str, tuple[str, Any]]:
    """Name -> (theme, row) of everything of one kind in `robopolicy/contrib`.

    Raises:
        ValueError: Two themes use one name.
    """
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
    """Entry points of the group `robopolicy.<kind>` by name, without importing them."""
    return {point.name: point for point in entry_points(group=f"robopolicy.{kind}")}


def load(target: str) -> Any:
    """Import the object at "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_entry_point(point: EntryPoint) -> Any:
    """The object of an entry point.

    Raises:
        UserError: It cannot be imported; names the entry point.
    """
    try:
        return point.load()
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        where = f"{point.name} = {point.value} of {point.group}"
        raise UserError(f"{where} failed: {reason}; fix or uninstall that package.") from error


class Registry(Mapping[str, T], Generic[T]):
    """The objects of one kind by name: the product's, those of contrib and those of installed packages.

    Looking a name up imports the one module that defines it. Iterating yields names and imports nothing.
    """

    def __init__(self, kind: str, rows: Mapping[str, T | str]) -> None:
        """Create a registry.

        Args:
            kind: Table of `theme.toml` and group of entry points, e.g. "algorithms".
            rows: The product's own: name -> object, or "module:attribute".
        """
        self.kind = kind
        self._rows: dict[str, Any] = dict(rows)

    def register(self, name: str, row: T | str) -> None:
        """Add an object, or the "module:attribute" where it is found, under a name.

        Raises:
            ValueError: The name is taken.
        """
        if name in self:
            raise ValueError(f"{self.kind} '{name}' is already registered.")
        self._rows[name] = row

    def ring(self, name: str) -> str:
        """Where a name comes from: "product", the theme of contrib, or the package that was installed."""
        if name in self._rows:
            return PRODUCT
        if name in (found := contributed(self.kind)):
            return found[name][0]
        point = installed(self.kind)[name]
        return point.dist.name if point.dist else point.value

    def product(self) -> list[str]:
        """Names of the product alone, sorted."""
        return sorted(self._rows)

    def summary(self, name: str) -> str:
        """First line of the docstring of an object, read from its source where it is not imported yet."""
        row: Any = self._row(name)
        if isinstance(row, EntryPoint):
            row = load_entry_point(row)
        return summary(row) if isinstance(row, str) else _first_line(row.__doc__)

    def attribute(self, name: str, attribute: str) -> Any:
        """Class attribute of an object, read from its source where it is not imported yet (see `class_attribute`)."""
        row: Any = self._row(name)
        if isinstance(row, EntryPoint):
            row = load_entry_point(row)
        return class_attribute(row, attribute) if isinstance(row, str) else getattr(row, attribute)

    def _row(self, name: str) -> Any:
        if name in self._rows:
            return self._rows[name]
        if name in (found := contributed(self.kind)):
            return found[name][1]
        return installed(self.kind)[name]

    def __getitem__(self, name: str) -> T:
        row = self._row(name)
        if isinstance(row, EntryPoint):
            row = load_entry_point(row)
        return load(row) if isinstance(row, str) else row

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._rows, *contributed(self.kind), *installed(self.kind)}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in contributed(self.kind) or name in installed(self.kind)


def summary(target: str) -> str:
    """First line of the docstring of the class or function at "module:attribute", without importing its module."""
    module, _, attribute = target.partition(":")
    for node in _syntax_tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return _first_line(ast.get_docstring(node))
    raise ValueError(f"{module} defines no class or function '{attribute}'.")


def class_attribute(target: str, name: str) -> Any:
    """Literal value of a class attribute of the class at "module:attribute", without importing its module.

    Classes that state no value of their own have the one of the first base class in the same module that does.

    Raises:
        ValueError: There is no such class, or neither it nor a base class in its module states a literal.
    """
    module, _, attribute = target.partition(":")
    classes = {node.name: node for node in _syntax_tree(module).body if isinstance(node, ast.ClassDef)}
    waiting = [attribute]
    while waiting:
        node = classes.get(waiting.pop(0))
        for statement in node.body if node else ():
            if (value := _assigned(statement, name)) is not None:
                return ast.literal_eval(value)
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)] if node else []
    raise ValueError(f"{target} states no literal '{name}'.")


def _assigned(statement: ast.stmt, name: str) -> ast.expr | None:
    """Right side of `name = value` or `name: type = value`; None for any other statement."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return None
    return statement.value if any(isinstance(node, ast.Name) and node.id == name for node in targets) else None


@cache
def _syntax_tree(module: str) -> ast.Module:
    """Syntax tree of a module, which is not imported; its parent packages are."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"There is no module '{module}'.")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n")[0]
