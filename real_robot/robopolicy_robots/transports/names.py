"""Names of topics and types in DDS and ROS 1."""

from __future__ import annotations

from robopolicy_robots.message import Message


def dds_topic(topic: str) -> str:
    """Topic in DDS, such as "rt/joint_states" for "/joint_states"."""
    return f"rt{topic}"


def dds_type(kind: type[Message]) -> str:
    """Type name in DDS, such as "sensor_msgs::msg::dds_::JointState_" for "sensor_msgs/msg/JointState"."""
    package, middle, name = kind.ros_name.split("/")
    return f"{package}::{middle}::dds_::{name}_"


def ros1_type(kind: type[Message]) -> str:
    """Type name in ROS 1, such as "sensor_msgs/JointState" for "sensor_msgs/msg/JointState"."""
    package, _, name = kind.ros_name.split("/")
    return f"{package}/{name}"
