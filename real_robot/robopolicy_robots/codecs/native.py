"""Messages as objects of the Python classes that a ROS 2 installation generates; for `rclpy`."""

from __future__ import annotations

from array import array
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from robopolicy.errors import UserError
from robopolicy_robots.codecs.definitions import FieldType, describe, reading
from robopolicy_robots.message import Message

M = TypeVar("M", bound=Message)


@cache
def native_type(kind: type[Message]) -> Any:
    """Class of the ROS installation for a message type; raises `UserError` if its package is not installed."""
    return native_class(kind.ros_name)


def native_class(ros_name: str) -> Any:
    """Class of the ROS installation for "sensor_msgs/msg/JointState" or "control_msgs/action/FollowJointTrajectory".

    Raises:
        UserError: The package is not installed.
    """
    package, group, name = ros_name.split("/")
    try:
        return getattr(import_module(f"{package}.{group}"), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"This ROS installation has no {ros_name}; install its package '{package}'.") from error


def encode(message: Message) -> Any:
    """Convert a message to an object of its ROS class."""
    kind = type(message)
    native = native_type(kind)()
    with reading(kind):
        for each in describe(kind):
            setattr(native, each.name, _write(each, getattr(message, each.name)))
    return native


def decode(kind: type[M], native: Any) -> M:
    """Convert an object of a ROS class, which must have the fields of `kind`."""
    with reading(kind):
        return kind(*(_read(each, getattr(native, each.name)) for each in describe(kind)))


def _write(each: FieldType, value: Any) -> Any:
    if each.dtype is not None:  # ROS keeps fixed arrays in numpy and sequences in array.array, and checks the type
        return value.copy() if each.size is not None else array(value.dtype.char, value.tobytes())
    if each.many:
        return [_write(FieldType(each.name, each.base), item) for item in value]
    if isinstance(each.base, type):
        return encode(value)
    return bytes([value]) if each.base == "byte" else value


def _read(each: FieldType, value: Any) -> Any:
    if each.dtype is not None:
        return np.array(value, each.dtype)
    if each.many:
        return tuple(_read(FieldType(each.name, each.base), item) for item in value)
    if isinstance(each.base, type):
        return decode(each.base, value)
    return value[0] if isinstance(value, bytes) else value
