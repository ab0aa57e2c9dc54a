"""Messages as bytes, JSON and objects of ROS; each module has `encode(message)` and `decode(kind, data)`.

`cdr` is what ROS 2 sends, `ros1` what ROS 1 sends, `json` what rosbridge sends, `native` copies to classes of rclpy.
Whatever cannot be read raises `CodecError`, and nothing else.
"""

from robopolicy_robots.codecs.definitions import CodecError, message_type, register

__all__ = ["CodecError", "message_type", "register"]
