"""Numbers that are accepted, so that nonsense and slips of the keyboard are refused instead of filling the memory.

A field of a config tells its range by its type, e.g. `lr: Positive = 3e-4`. Configs are `Ranged`, so that numbers are
held to it however one is built; `robopolicy.schema.from_plain` checks them before, to name them as the user does.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from robopolicy.errors import UserError

MOST = 1_000_000  # of anything counted that is not listed
LARGEST = {
    "seed": 2**32 - 1,  # what every generator in use tells apart
    "episodes": 10_000_000,
    "num_envs": 100_000,
    "threads": 1024,
    "image_size": 4096,  # pixels, within what every GL library draws
    "points": 9216,  # of a cloud: the pixels of its depth image
    "width": 4096,
    "height": 4096,
    "hold": 10_000,  # control steps
    "horizon": 10_000,
    "obs_horizon": 10_000,
    "capacity": 100_000_000,
}
UNBOUNDED = (  # they only say when something happens
    "updates",
    "env_steps",
    "every",
    "checkpoint_every",
    "warmup_steps",
    "offline_updates",
)


@dataclass(frozen=True)
class Range:
    """Where a number must lie; stands in `Annotated` beside its type."""

    least: float = -math.inf
    most: float = math.inf  # of a count without one: as its name says, see `check_count`
    above: bool = False  # `least` itself is refused
    below: bool = False  # `most` itself is refused

    def check(self, name: str, value: float) -> None:
        """Refuse a number outside the range, or one that is not finite.

        Args:
            name: Dotted setting.
            value: The number; a whole one is a count.

        Raises:
            UserError: Names the setting, the range and the number.
        """
        if problem := self.problem(name, value):
            raise UserError(problem)

    def problem(self, name: str, value: float) -> str:
        """What `check` says of a number; empty where it is accepted."""
        if isinstance(value, int):
            return _count_problem(name, value, int(self.least), None if self.most == math.inf else int(self.most))
        if not math.isfinite(value):
            return f"{name} must be a finite number, got {value}."
        return "" if self._holds(value) else f"{name} must {self._words()}, got {value}."

    def _holds(self, value: float) -> bool:
        high_enough = value > self.least if self.above else value >= self.least
        return high_enough and (value < self.most if self.below else value <= self.most)

    def _words(self) -> str:
        if self.most < math.inf:
            return f"lie in {'(' if self.above else '['}{self.least:g}, {self.most:g}{')' if self.below else ']'}"
        if self.least == 0:
            return "be positive" if self.above else "not be negative"
        return f"be {'above' if self.above else 'at least'} {self.least:g}"


@dataclass(frozen=True)
class UpTo:
    """A number that another field bounds; stands in `Annotated` behind the number's own range."""

    field: str  # the one that holds the bound
    below: bool = False  # the bound itself is refused

    def check(self, name: str, value: float, bound: float) -> None:
        """Refuse a number beyond the bound.

        Raises:
            UserError: Names both fields and their numbers.
        """
        if value > bound or (self.below and value == bound):
            words = "lie below" if self.below else "be at most"
            raise UserError(f"{name} must {words} {self.field}={bound}, got {value}.")


class Ranged:
    """Base of dataclasses: refuses numbers outside the ranges that the types of their fields tell.

    A subclass with checks of its own starts its `__post_init__` with that of this class.
    """

    def __post_init__(self) -> None:
        hints = _ranges(type(self))
        for name, hint in hints.items():
            _check(name, hint, getattr(self, name))
        for name, hint in hints.items():
            for bound in get_args(hint)[1:]:
                if isinstance(bound, UpTo):
                    bound.check(name, getattr(self, name), getattr(self, bound.field))


@cache
def _ranges(cls: type[Any]) -> dict[str, Any]:
    """Types of the fields with a range in them."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint for name, hint in hints.items() if _has_range(hint)}


def _has_range(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return any(isinstance(each, Range) for each in get_args(hint)[1:])
    return any(_has_range(item) for item in get_args(hint))


def _check(name: str, hint: Any, value: Any) -> None:
    """Hold a number, or those of a tuple or a mapping, to the range in its type."""
    origin, items = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number = float(value) if items[0] is float else value
        for each in items[1:]:
            if isinstance(each, Range):
                each.check(name, number)
    elif origin is tuple:
        for entry in value:
            _check(name, items[0], entry)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _check(f"{name}.{key}", items[1], entry)
    elif origin in (Union, types.UnionType) and value is not None:
        _check(name, next(item for item in items if item is not types.NoneType), value)


Count = Annotated[int, Range(1)]
Several = Annotated[int, Range(2)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, LARGEST["seed"])]
Bytes = Annotated[int, Range(0, 2**48)]
Layers = Annotated[int, Range(1, 1000)]  # every one of them costs time to build
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Finite = Annotated[float, Range()]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
PartialShare = Annotated[float, Range(0, 1, below=True)]
InnerShare = Annotated[float, Range(0, 1, above=True, below=True)]
Ratio = Annotated[float, Range(0, 1000, above=True)]  # gradient steps per step played


def check_count(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse a count outside its range.

    Args:
        name: Option or dotted setting; its last part decides the largest value where `most` does not.
        value: The number.
        least: Smallest accepted value.
        most: Largest accepted value.

    Raises:
        UserError: It lies outside.
    """
    if problem := _count_problem(name, value, least, most):
        raise UserError(problem)


def _count_problem(name: str, value: int, least: int, most: int | None) -> str:
    if value < least:
        return f"{name} must be at least {least}, got {value}."
    key = name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    if most is None and key not in UNBOUNDED:
        most = LARGEST.get(key, MOST)
    if most is not None and value > most:
        return f"{name} must be at most {most}, got {value}."
    return ""
