"""Definitions of message types from rosbags: fields, hashes, and types from `.msg` text.

The typestore contains the definitions of ROS 2 Jazzy. The types of this package are the same in every release since
Foxy, and in ROS 1 except for the sequence number of a header, which the codec of ROS 1 adds.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any

import numpy as np

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy_robots.message import CATALOGUE, Message, array

_SCALARS = {"bool": False, "string": "", "float32": 0.0, "float64": 0.0}  # all others are integers
_DTYPES = {"bool": np.bool_, "byte": np.uint8}  # the others are named as in numpy


class CodecError(ValueError):
    """Invalid data for a message type, or a message with invalid values."""


@dataclass(frozen=True)
class FieldType:
    """One field of a definition."""

    name: str
    base: str | type[Message]  # "float64", "string", ..., or the type of a nested message
    many: bool = False  # an array or a sequence
    size: int | None = None  # length of an array
    bound: int = 0  # largest length of a string; 0 without a bound

    @property
    def dtype(self) -> type[np.generic] | None:
        """Element type of a numeric array; None for single values, strings and messages."""
        return self.element if self.many else None

    @property
    def element(self) -> type[np.generic] | None:
        """Type of one number; None for strings and messages."""
        if self.base == "string" or not isinstance(self.base, str):
            return None
        return _DTYPES.get(self.base) or getattr(np, self.base)


@cache
def _store() -> Any:
    typesys = require("rosbags.typesys", "ros")
    store = typesys.get_typestore(typesys.Stores.ROS2_JAZZY)
    store.fielddefs.update(_as_ros(store.fielddefs))
    return store


def _as_ros(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions with `uint8` for `char`, which ROS 2 replaces before it hashes a type."""
    return {
        name: (constants, [(field_name, _without_char(kind)) for field_name, kind in entries])
        for name, (constants, entries) in definitions.items()
    }


def _without_char(description: Any) -> Any:
    kind, detail = description
    if detail == ("char", 0):
        return kind, ("uint8", 0)
    nested = isinstance(detail, tuple) and isinstance(detail[0], tuple)
    return kind, (_without_char(detail[0]), detail[1]) if nested else detail


@cache
def describe(kind: type[Message]) -> tuple[FieldType, ...]:
    """Fields of a message type, in order; raises `CodecError` if it is unknown or its dataclass differs."""
    described = _defined(kind.ros_name)
    found = tuple((each.name, each.metadata.get("dtype"), each.metadata.get("size")) for each in fields(kind))  # type: ignore[arg-type]
    expected = tuple((each.name, each.dtype, each.size if each.dtype else None) for each in described)
    if found != expected:
        raise CodecError(f"The fields of {kind.__name__} differ from {kind.ros_name}: expected {expected}.")
    return described


@cache
def prepare(kind: type[Message]) -> Any:
    """Return the typestore with a compiled codec for `kind`; the first call takes about 10 ms."""
    store = _store()
    for each in describe(kind):
        if isinstance(each.base, type):
            prepare(each.base)
    store.types[kind.ros_name] = kind  # so that rosbags reads into our dataclasses
    store.get_msgdef(kind.ros_name)
    return store


@cache
def type_hash(kind: type[Message]) -> str:
    """Hash "RIHS01_..." of a definition, by which ROS 2 (Iron and later) compares types."""
    return prepare(kind).hash_rihs01(kind.ros_name)


def message_type(name: str) -> type[Message]:
    """Message type of a ROS name, created from its definition if needed; raises `UserError` without a definition."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    if name not in _store().fielddefs:
        raise UserError(f"Unknown message type '{name}'; register its .msg text with codecs.register.")
    members = [(each.name, Any, _default(each)) for each in _defined(name)]
    short = name.rsplit("/", 1)[-1]
    return make_dataclass(short, members, bases=(Message,), namespace={"ros_name": name}, frozen=True, eq=False)


def register(name: str, text: str) -> type[Message]:
    """Add a message type.

    Args:
        name: ROS name ("control_msgs/msg/JointJog").
        text: Content of the `.msg` file; nested types must be registered before.

    Raises:
        UserError: The text is not a definition, or the name has another definition.
    """
    typesys = require("rosbags.typesys", "ros")
    if name.count("/") != 2 or name.split("/")[1] != "msg":
        raise UserError(f"Expected a name like 'package/msg/Type', found '{name}'.")
    try:
        _store().register(_as_ros(typesys.get_types_from_msg(text, name)))
        return message_type(name)
    except (typesys.TypesysError, KeyError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"The definition of {name} cannot be used: {line}") from error


@contextmanager
def reading(kind: type[Message]) -> Iterator[None]:
    """Convert every exception from received data to a `CodecError`."""
    try:
        yield
    except CodecError:
        raise
    except Exception as error:  # any exception: received data must not stop the reader
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise CodecError(f"No {kind.ros_name}: {reason[:200]}") from error


def _defined(name: str) -> tuple[FieldType, ...]:
    try:
        _, entries = _store().fielddefs[name]
    except KeyError as error:
        raise CodecError(f"Unknown message type '{name}'.") from error
    return tuple(_field(field_name, description) for field_name, description in entries)


def _field(name: str, description: Any) -> FieldType:
    kind, detail = description
    node = require("rosbags.interfaces", "ros").Nodetype
    name += "_" if keyword.iskeyword(name) else ""
    if kind == node.BASE:
        return FieldType(name, detail[0], bound=detail[1])
    if kind == node.NAME:
        return FieldType(name, message_type(detail))
    item = _field(name, detail[0])
    return FieldType(name, item.base, True, detail[1] if kind == node.ARRAY else None, item.bound)


def _default(each: FieldType) -> Any:
    if each.dtype is not None:
        return array(each.dtype, each.size)
    single = each.base if isinstance(each.base, type) else lambda: _SCALARS.get(str(each.base), 0)
    return field(default_factory=(lambda: (single(),) * (each.size or 0)) if each.many else single)
