"""Base class of message types; `robopolicy_robots.messages` defines the types.

A type is a frozen dataclass with the fields of its ROS 2 definition, in order. Lists of numbers are arrays, and lists
of strings or messages are tuples. Two messages are equal if all their fields are equal (NaN equals NaN).
"""

from __future__ import annotations

from dataclasses import field, fields
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

CATALOGUE: dict[str, type[Message]] = {}  # {"sensor_msgs/msg/JointState": JointState, ...}


def array(dtype: type[np.generic] = np.float64, size: int | None = None) -> Any:
    """Dataclass field with an array `(size,)`, or of any length if `size` is None; zeros by default."""
    return field(default_factory=lambda: np.zeros(size or 0, dtype), metadata={"dtype": dtype, "size": size})


class Message:
    """Base class of messages; treat them as immutable, since readers may share them."""

    ros_name: ClassVar[str]  # "sensor_msgs/msg/JointState"

    def __init_subclass__(cls) -> None:
        if "ros_name" in vars(cls):
            CATALOGUE[cls.ros_name] = cls

    def __post_init__(self) -> None:
        for name, dtype, size in _arrays(type(self)):
            values = np.ascontiguousarray(getattr(self, name), dtype).reshape(-1)
            if size not in (None, len(values)):
                raise ValueError(f"{self.ros_name}.{name} must contain {size} numbers, found {len(values)}.")
            object.__setattr__(self, name, values)
        for name in _others(type(self)):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in field_names(type(self)))
        return all(_equal(mine, others) for mine, others in pairs)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Self:
        """Deep copy."""
        return type(self)(*(_copy(getattr(self, name)) for name in field_names(type(self))))


@cache
def field_names(kind: type[Message]) -> tuple[str, ...]:
    """Names of the fields of a message type, in the order of its definition."""
    return tuple(each.name for each in fields(kind))  # type: ignore[arg-type]


@cache
def _arrays(kind: type[Message]) -> tuple[tuple[str, type, int | None], ...]:
    found = [each for each in fields(kind) if "dtype" in each.metadata]  # type: ignore[arg-type]
    return tuple((each.name, each.metadata["dtype"], each.metadata["size"]) for each in found)


@cache
def _others(kind: type[Message]) -> tuple[str, ...]:
    arrays = {name for name, _, _ in _arrays(kind)}
    return tuple(name for name in field_names(kind) if name not in arrays)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return one == other or (isinstance(one, float) and one != one and other != other)


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray | Message):
        return value.copy()
    return tuple(_copy(each) for each in value) if isinstance(value, tuple) else value
