"""Messages in the format of ROS 1: packed, little endian, with sequence numbers in headers (written as 0)."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from robopolicy.optional import require
from robopolicy_robots.codecs import cdr
from robopolicy_robots.codecs.definitions import prepare, reading
from robopolicy_robots.message import Message

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Encode a message."""
    kind = type(message)
    with reading(kind):
        return bytes(prepare(kind).cdr_to_ros1(cdr.encode(message), kind.ros_name))


def decode(kind: type[M], data: bytes) -> M:
    """Decode a message."""
    with reading(kind):
        return cdr.decode(kind, prepare(kind).ros1_to_cdr(memoryview(data), kind.ros_name))


@cache
def definition(kind: type[Message]) -> tuple[str, str]:
    """Text of the ROS 1 (Noetic) definition and its MD5 sum, by which ROS 1 compares types."""
    typesys = require("rosbags.typesys", "ros")
    with reading(kind):
        return typesys.get_typestore(typesys.Stores.ROS1_NOETIC).generate_msgdef(kind.ros_name)
