"""Codecs of messages; each module has `encode(message)` and `decode(kind, data)`.

`cdr` is the format of ROS 2, `ros1` of ROS 1, `json` of rosbridge; `native` converts to classes of rclpy.
Invalid data and invalid field values raise `CodecError` and no other exception.
"""

from robopolicy_robots.codecs.definitions import CodecError, message_type, register

__all__ = ["CodecError", "message_type", "register"]
