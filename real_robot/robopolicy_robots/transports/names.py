"""Names of topics and types on the wire."""

from __future__ import annotations

from robopolicy_robots.message import Message


def dds_topic(topic: str) -> str:
    """The topic of DDS: "/joint_states" is "rt/joint_states"."""
    return f"rt{topic}"


def dds_type(kind: type[Message]) -> str:
    """The type name of DDS: "sensor_msgs/msg/JointState" is "sensor_msgs::msg::dds_::JointState_"."""
    package, middle, name = kind.ros_name.split("/")
    return f"{package}::{middle}::dds_::{name}_"


def ros1_type(kind: type[Message]) -> str:
    """The type name of ROS 1: "sensor_msgs/msg/JointState" is "sensor_msgs/JointState"."""
    package, _, name = kind.ros_name.split("/")
    return f"{package}/{name}"
