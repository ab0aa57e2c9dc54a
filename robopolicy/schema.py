"""Conversion between plain values (JSON, YAML) and frozen config dataclasses, with strict checks."""

from __future__ import annotations

import dataclasses
import json
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from robopolicy.constraints import Range
from robopolicy.errors import UserError, unknown_name

T = TypeVar("T")
_FILLED: ContextVar[list[str] | None] = ContextVar("filled", default=None)


class CustomSerialization(ABC):
    """Base class of settings whose serialized form is not a mapping of their fields."""

    @classmethod
    @abstractmethod
    def from_dict(cls, value: Any, where: str) -> Self:
        """Build the setting `where` from plain values; invalid values raise a UserError."""

    @abstractmethod
    def to_dict(self) -> Any:
        """Inverse of `from_dict`."""


@contextmanager
def fill_defaults() -> Iterator[list[str]]:
    """Let `from_dict` fill missing settings with defaults; yields the list of their names, which grows.

    For files of older versions, by callers that verify that the defaults are correct.
    """
    filled: list[str] = []
    token = _FILLED.set(filled)
    try:
        yield filled
    finally:
        _FILLED.reset(token)


def from_dict(cls: type[T], data: Any, where: str) -> T:
    """Build the dataclass `cls` from a mapping of plain values; lists become tuples where the field is one.

    Args:
        cls: Config dataclass; fields may be numbers with ranges (`robopolicy.constraints`), strings, bools, None,
            tuples, nested dataclasses and `CustomSerialization`.
        data: Mapping with exactly the fields of `cls`.
        where: Name of the file or section, for messages; empty if settings have full names.

    Raises:
        UserError: A key is unknown or missing, or a value has the wrong type or is out of range.
    """
    place = where or "The configuration"
    if not isinstance(data, Mapping):
        raise UserError(f"{place} must be a mapping, found {type(data).__name__}.")
    hints = get_type_hints(cls, include_extras=True)
    entries = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    names = [entry.name for entry in entries]
    for key in data:
        if key not in names:
            raise unknown_name("setting", str(key), names, f"in {where}" if where else "")
    filled = _FILLED.get()
    for entry in entries:
        if entry.name in data:
            continue
        if filled is None or entry.default is entry.default_factory is dataclasses.MISSING:
            raise UserError(f"{place} lacks '{entry.name}'; it was written by another version or edited by hand.")
        filled.append(entry.name)
    paths = {name: f"{where}.{name}" if where else name for name in names if name in data}
    return cls(**{name: _convert(hints[name], data[name], path) for name, path in paths.items()})


def with_defaults(cls: type[T], settings: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` like `from_dict`, with defaults for missing settings."""
    if not isinstance(settings, Mapping):
        raise _mismatch(where, "a mapping", settings)
    return from_dict(cls, {**to_dict(cls()), **settings}, where)


def to_dict(config: Any) -> dict[str, Any]:
    """Inverse of `from_dict`."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}


def reject_unused(config: T, section: str, reason: str, *names: str, default: T | None = None) -> None:
    """Raise a UserError if a setting that nothing reads differs from its default.

    Args:
        config: Config dataclass of the `section`.
        section: Prefix of the full names of its settings.
        reason: End of the sentence "KEY has no effect ...", e.g. "with sim.num_workers=0".
        names: Fields that nothing reads; none: all.
        default: Config with the defaults; None: the defaults of the class.
    """
    for entry in dataclasses.fields(config):  # type: ignore[arg-type]
        if names and entry.name not in names:
            continue
        value = getattr(config, entry.name)
        expected = _default(entry) if default is None else getattr(default, entry.name)
        if value == expected:
            continue
        if dataclasses.is_dataclass(value):
            reject_unused(value, f"{section}.{entry.name}", reason, default=expected)
        found, start = _text(value), _text(expected)
        raise UserError(f"{section}.{entry.name}={found} has no effect {reason}; leave it out (default: {start}).")


def _text(value: Any) -> str:
    """Format a value as on a command line."""
    return value if isinstance(value, str) else json.dumps(_plain(value), separators=(",", ":"))


def open_schema(cls: type[Any], **extra: Any) -> type[Any]:
    """Copy the config dataclass `cls` and its nested dataclasses without `frozen`, as Hydra requires.

    Args:
        cls: Frozen config dataclass with defaults for all fields.
        extra: Defaults of additional or replaced fields, of type `Any` or `str`.
    """
    hints = get_type_hints(cls)
    rows: dict[str, tuple[str, Any, Any]] = {}
    for entry in dataclasses.fields(cls):
        hint, value = hints[entry.name], _default(entry)
        if any(_has_custom_serialization(item) for item in get_args(hint)):  # Hydra takes their serialized form
            hint, value = tuple[Any, ...], _plain(value)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            hint = open_schema(hint)
            value = _copy_into(hint, value)
        rows[entry.name] = (entry.name, hint, _factory(value))
    for name, value in extra.items():
        rows[name] = (name, Any if name in rows else type(value), _factory(value))
    return dataclasses.make_dataclass(cls.__name__, list(rows.values()))


def _copy_into(cls: type[Any], value: Any) -> Any:
    """Copy the values of a config into an instance of `cls`, its open copy."""
    hints = get_type_hints(cls)
    return cls(
        **{
            entry.name: _copy_into(hints[entry.name], item) if dataclasses.is_dataclass(item) else item
            for entry in dataclasses.fields(value)
            for item in [getattr(value, entry.name)]
        }
    )


def _default(entry: dataclasses.Field[Any]) -> Any:
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def _factory(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)


def _has_custom_serialization(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, CustomSerialization)


def _plain(value: Any) -> Any:
    if isinstance(value, CustomSerialization):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        return _convert_annotated(hint, value, where)
    if _has_custom_serialization(hint):
        return hint.from_dict(value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, where)
    if origin in (tuple, list) or hint in (tuple, list):
        if not isinstance(value, list | tuple):
            raise _mismatch(where, "a list", value)
        item = (get_args(hint) or (Any,))[0]
        entries = [_convert(item, entry, f"{where}[{index}]") for index, entry in enumerate(value)]
        return tuple(entries) if tuple in (origin, hint) else entries
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _mismatch(where, "a mapping", value)
        item = (*get_args(hint), Any)[1]
        return {key: _convert(item, entry, f"{where}.{key}") for key, entry in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise UserError(f"{where} must be a number that a float can hold.") from error
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise _mismatch(where, f"a value of type {hint.__name__}", value)
    return value


def _convert_annotated(hint: Any, value: Any, where: str) -> Any:
    """Convert a value and check it against the ranges in its annotated type."""
    inner, *ranges = get_args(hint)
    converted = _convert(inner, value, where)
    for item in ranges:
        if isinstance(item, Range):
            item.check(where, converted)
    return converted


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    members = [option for option in options if option is not type(None)]
    for member in members[:-1]:
        try:
            return _convert(member, value, where)
        except UserError:
            continue
    return _convert(members[-1], value, where)


def _mismatch(where: str, expected: str, value: Any) -> UserError:
    return UserError(f"{where} must be {expected}, found {value!r}.")
