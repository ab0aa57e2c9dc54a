"""Messages as CDR (XCDR1, little endian), the bytes of ROS 2 over any middleware."""

from __future__ import annotations

from typing import TypeVar

from robopolicy_robots.codecs.definitions import prepare, reading
from robopolicy_robots.message import Message

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Encode a message, with the encapsulation header of four bytes."""
    kind = type(message)
    with reading(kind):
        return bytes(prepare(kind).serialize_cdr(message, kind.ros_name, little_endian=True))


def decode(kind: type[M], data: bytes | memoryview) -> M:
    """Decode a message of either byte order."""
    with reading(kind):
        return prepare(kind).deserialize_cdr(memoryview(data), kind.ros_name)
