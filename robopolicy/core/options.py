"""Validation of plain option values against the types of their parameters (`robopolicy.constraints`)."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Union, cast, get_args, get_origin

from robopolicy.constraints import Range

MAX_MAGNITUDE = 1e15
"""Largest magnitude of a number, so that results fit single precision."""

_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def is_plain(hint: Any) -> bool:
    """Whether an option of this type is a plain value, or a list or mapping of plain values, not a component."""
    hint, _ = _required(hint)
    items = [item for item in get_args(hint) if item is not Ellipsis]
    if get_origin(hint) in (Sequence, Mapping, tuple):
        return all(_single_type(item) in _NAMES for item in items)
    return _single_type(hint) in _NAMES


def validate_option(what: str, hint: Any, plain: Any) -> Any:
    """Check a plain value against the type `hint` of its option, and return it; lists become tuples.

    `what` is the name in error messages, e.g. "Option 'low' of bounds 'constant'".

    Raises:
        ValueError: The type is wrong, or the value is out of range, empty or not finite.
    """
    hint, optional = _required(hint)
    if plain is None and optional:
        return None
    origin, items = get_origin(hint), get_args(hint)
    if origin in (Sequence, tuple):
        if not isinstance(plain, list | tuple) or not plain:
            raise ValueError(f"{what} must be a list with entries, got {reprlib.repr(cast(Any, plain))}.")
        entries = cast(Sequence[Any], plain)
        if origin is tuple and len(entries) != len(items):
            raise ValueError(f"{what} must be {len(items)} numbers, got {reprlib.repr(entries)}.")
        return tuple(_single(f"Every entry of {_lower(what)}", items[0], value) for value in entries)
    if origin is Mapping:
        if not isinstance(plain, Mapping):
            raise ValueError(f"{what} must be a mapping, got {reprlib.repr(plain)}.")
        pairs = cast(Mapping[Any, Any], plain).items()
        return {str(key): _single(f"'{key}' in {_lower(what)}", items[1], value) for key, value in pairs}
    return _single(what, hint, plain)


def _required(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is allowed."""
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        others = [item for item in get_args(hint) if item is not type(None)]
        return others[0], True
    return hint, False


def _single_type(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _single(what: str, hint: Any, plain: Any) -> Any:
    """Check a value of one of the types in `_NAMES` and its range."""
    kind = _single_type(hint)
    accepted = int | float if kind is float else kind
    if not isinstance(plain, accepted) or (isinstance(plain, bool) and kind is not bool):
        raise ValueError(f"{what} must be {_NAMES[kind]}, got {reprlib.repr(plain)}{_hint(kind, plain)}.")
    if kind in (int, float):
        if not abs(plain) <= MAX_MAGNITUDE:  # also true for NaN
            limit = f"{_NAMES[kind]}, at most {MAX_MAGNITUDE:.0e} in size"
            raise ValueError(f"{what} must be {limit}, got {reprlib.repr(plain)}.")
        for each in get_args(hint)[1:]:
            if isinstance(each, Range) and (problem := each.problem(what, kind(plain))):
                raise ValueError(problem)
    return plain


def _hint(kind: type, plain: Any) -> str:
    """Hint for a number with an exponent but no decimal point, which YAML reads as text."""
    if kind is float and isinstance(plain, str):
        with suppress(ValueError):
            return f", a text to YAML; write it with a point, e.g. {float(plain):.1e}"
    return ""


def _lower(what: str) -> str:
    return what[0].lower() + what[1:]
