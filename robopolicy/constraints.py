"""Ranges of numeric config fields, so that a typing error raises an error instead of exhausting the memory.

The type of a config field gives its range, e.g. `lr: Positive = 3e-4`. Configs derive from `Validated`, which checks
the numbers at construction; `robopolicy.schema.from_dict` checks them first and reports the full name of the setting.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from robopolicy.errors import UserError

MAX_COUNT = 1_000_000  # for counts without an entry in MAX_VALUES
MAX_VALUES = {
    "seed": 2**32 - 1,  # accepted by every generator in use
    "episodes": 10_000_000,
    "num_envs": 100_000,
    "threads": 1024,
    "image_size": 4096,  # pixels, supported by every GL library
    "points": 9216,  # per cloud: the pixels of its depth image
    "width": 4096,
    "height": 4096,
    "hold": 10_000,  # control steps
    "capacity": 100_000_000,
    "port": 65_535,
}
UNBOUNDED = ("updates", "env_steps", "every", "checkpoint_every", "learning_starts", "offline_updates")  # schedules


@dataclass(frozen=True)
class Range:
    """Range of a number, given in `Annotated` after its type."""

    minimum: float = -math.inf
    maximum: float = math.inf  # an infinite maximum of a count depends on its name, see `check_count`
    exclusive_minimum: bool = False  # `minimum` itself is invalid
    exclusive_maximum: bool = False  # `maximum` itself is invalid

    def check(self, name: str, value: float) -> None:
        """Raise a UserError if `value` of the setting `name` is outside the range or not finite."""
        if problem := self.problem(name, value):
            raise UserError(problem)

    def problem(self, name: str, value: float) -> str:
        """Return the error message of `check`; an empty string if the number is valid."""
        if isinstance(value, int):
            maximum = None if self.maximum == math.inf else int(self.maximum)
            return _count_problem(name, value, int(self.minimum), maximum)
        if not math.isfinite(value):
            return f"{name} must be a finite number, got {value}."
        return "" if self._contains(value) else f"{name} must {self._description()}, got {value}."

    def _contains(self, value: float) -> bool:
        high_enough = value > self.minimum if self.exclusive_minimum else value >= self.minimum
        return high_enough and (value < self.maximum if self.exclusive_maximum else value <= self.maximum)

    def _description(self) -> str:
        if self.maximum < math.inf:
            left, right = "(" if self.exclusive_minimum else "[", ")" if self.exclusive_maximum else "]"
            return f"lie in {left}{self.minimum:g}, {self.maximum:g}{right}"
        if self.minimum == 0:
            return "be positive" if self.exclusive_minimum else "not be negative"
        return f"be {'above' if self.exclusive_minimum else 'at least'} {self.minimum:g}"


@dataclass(frozen=True)
class AtMost:
    """Upper bound given by another field; placed in `Annotated` after the number's own range."""

    field: str  # name of the field with the bound
    exclusive: bool = False  # the bound itself is invalid

    def check(self, name: str, value: float, bound: float) -> None:
        """Raise a UserError that names both fields if `value` exceeds the bound."""
        if value > bound or (self.exclusive and value == bound):
            relation = "lie below" if self.exclusive else "be at most"
            raise UserError(f"{name} must {relation} {self.field}={bound}, got {value}.")


class Validated:
    """Base class of dataclasses that checks numbers against the ranges in the types of their fields.

    A subclass with its own checks calls the `__post_init__` of this class first.
    """

    def __post_init__(self) -> None:
        hints = _ranges(type(self))
        for name, hint in hints.items():
            _check(name, hint, getattr(self, name))
        for name, hint in hints.items():
            for bound in get_args(hint)[1:]:
                if isinstance(bound, AtMost):
                    bound.check(name, getattr(self, name), getattr(self, bound.field))


@cache
def _ranges(cls: type[Any]) -> dict[str, Any]:
    """Return the types of the fields that have a range."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint for name, hint in hints.items() if _has_range(hint)}


def _has_range(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return any(isinstance(item, Range) for item in get_args(hint)[1:])
    return any(_has_range(item) for item in get_args(hint))


def _check(name: str, hint: Any, value: Any) -> None:
    """Check a number, or the numbers of a tuple or mapping, against the range in the type `hint`."""
    origin, items = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number = float(value) if items[0] is float else value
        for item in items[1:]:
            if isinstance(item, Range):
                item.check(name, number)
    elif origin is tuple:
        for entry in value:
            _check(name, items[0], entry)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _check(f"{name}.{key}", items[1], entry)
    elif origin in (Union, types.UnionType) and value is not None:
        _check(name, next(item for item in items if item is not types.NoneType), value)


PositiveInt = Annotated[int, Range(1)]
AtLeastTwo = Annotated[int, Range(2)]
NonNegativeInt = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, MAX_VALUES["seed"])]
Bytes = Annotated[int, Range(0, 2**48)]
Layers = Annotated[int, Range(1, 1000)]  # the time to build a network grows with its layers
Positive = Annotated[float, Range(0, exclusive_minimum=True)]
NonNegative = Annotated[float, Range(0)]
Finite = Annotated[float, Range()]
Fraction = Annotated[float, Range(0, 1)]
PositiveFraction = Annotated[float, Range(0, 1, exclusive_minimum=True)]
FractionBelowOne = Annotated[float, Range(0, 1, exclusive_maximum=True)]
OpenFraction = Annotated[float, Range(0, 1, exclusive_minimum=True, exclusive_maximum=True)]
Ratio = Annotated[float, Range(0, 1000, exclusive_minimum=True)]  # gradient steps per environment step


def check_count(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise a UserError if a count is outside `[least, most]`.

    Without `most`, the maximum depends on the last part of `name`, an option or dotted setting (see `MAX_VALUES`).
    """
    if problem := _count_problem(name, value, least, most):
        raise UserError(problem)


def _count_problem(name: str, value: int, least: int, most: int | None) -> str:
    if value < least:
        return f"{name} must be at least {least}, got {value}."
    key = name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    if most is None and key not in UNBOUNDED:
        most = MAX_VALUES.get(key, MAX_COUNT)
    if most is not None and value > most:
        return f"{name} must be at most {most}, got {value}."
    return ""
