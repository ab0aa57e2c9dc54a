"""Messages as JSON values in the format of rosbridge.

Bytes are base64, NaN and infinities are null (decoded as NaN), and ROS 1 names times `secs` and `nsecs`.
Unknown keys (`seq` of a ROS 1 header) are ignored; missing keys are an error.
"""

from __future__ import annotations

import base64
import math
from typing import Any, TypeVar

import numpy as np

from robopolicy_robots.codecs.definitions import CodecError, FieldType, describe, reading
from robopolicy_robots.message import Message
from robopolicy_robots.messages import Duration, Time

M = TypeVar("M", bound=Message)
_TIMES: dict[str, str] = {"sec": "secs", "nanosec": "nsecs"}
# {type: {field: name in ROS 1}}
_ROS1 = {
    Time.ros_name: _TIMES,
    Duration.ros_name: _TIMES,
    "sensor_msgs/msg/CameraInfo": {"d": "D", "k": "K", "r": "R", "p": "P"},
}
_OCTETS = np.dtype(np.uint8)


def encode(message: Message, ros1: bool = False) -> dict[str, Any]:
    """Convert a message to values for `json.dumps(..., allow_nan=False)`, with ROS 1 field names if `ros1`."""
    kind = type(message)
    names = _ROS1.get(kind.ros_name, {}) if ros1 else {}
    with reading(kind):
        return {
            names.get(each.name, each.name): _write(each, getattr(message, each.name), ros1) for each in describe(kind)
        }


def decode(kind: type[M], data: Any) -> M:
    """Decode a message with field names of ROS 1 or ROS 2."""
    with reading(kind):
        if not isinstance(data, dict):
            raise CodecError(f"No {kind.ros_name}: expected an object, found {type(data).__name__}")
        return kind(*(_read(kind, each, data) for each in describe(kind)))


def _write(each: FieldType, value: Any, ros1: bool) -> Any:
    if each.dtype is not None:
        if value.dtype == _OCTETS:
            return base64.b64encode(value.tobytes()).decode()
        finite = value.dtype.kind != "f" or np.isfinite(value).all()
        return value.tolist() if finite else [_finite(number) for number in value.tolist()]
    if each.many:
        return [_write_one(each, item, ros1) for item in value]
    return _write_one(each, value, ros1)


def _write_one(each: FieldType, value: Any, ros1: bool) -> Any:
    if isinstance(each.base, type):
        return encode(value, ros1)
    return _finite(float(value)) if each.base in ("float32", "float64") else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(kind: type[Message], each: FieldType, data: dict[str, Any]) -> Any:
    other = _ROS1.get(kind.ros_name, {}).get(each.name, each.name)
    if each.name not in data and other not in data:
        raise CodecError(f"No {kind.ros_name}: '{each.name}' is missing")
    value = data[each.name] if each.name in data else data[other]
    if each.dtype is not None:
        return _read_array(kind, each, value)
    if not each.many:
        return _read_one(kind, each, value)
    if not isinstance(value, list) or each.size not in (None, len(value)):
        raise _unexpected(kind, each, value)
    return tuple(_read_one(kind, each, item) for item in value)


def _read_array(kind: type[Message], each: FieldType, value: Any) -> Any:
    if isinstance(value, str) and each.dtype is np.uint8:
        return np.frombuffer(base64.b64decode(value, validate=True), np.uint8)
    if not isinstance(value, list):
        raise _unexpected(kind, each, value)
    scalar = FieldType(each.name, each.base)
    return np.array([_read_one(kind, scalar, item) for item in value], each.dtype)


def _read_one(kind: type[Message], each: FieldType, value: Any) -> Any:
    if isinstance(each.base, type):
        return decode(each.base, value)
    if each.base in ("float32", "float64"):
        if value is None:
            return math.nan
        if type(value) in (int, float):
            return float(value)
    elif type(value) is {"string": str, "bool": bool}.get(each.base, int) and _fits(value, each):
        return value
    raise _unexpected(kind, each, value)


def _fits(value: Any, each: FieldType) -> bool:
    """Whether a number is in the range of its field, if it is an integer."""
    if type(value) is not int:
        return True
    limits = np.iinfo(each.element)  # type: ignore[arg-type]
    return limits.min <= value <= limits.max


def _unexpected(kind: type[Message], each: FieldType, value: Any) -> CodecError:
    expected = each.base if isinstance(each.base, str) else each.base.ros_name
    return CodecError(f"No {kind.ros_name}: expected '{each.name}' of {expected}, found {repr(value)[:60]}")
