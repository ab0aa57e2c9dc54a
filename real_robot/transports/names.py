"""Names of topics and types on the wire."""

from __future__ import annotations

import re

from real_robot.message import Message
from real_robot.transports.base import TransportError

_TOPIC = re.compile(r"(/[A-Za-z_][A-Za-z0-9_]*)+")


def checked(topic: str) -> str:
    """A topic, as it is.

    Raises:
        TransportError: It is not absolute ("/joint_states"), or has characters that ROS does not allow.
    """
    if not _TOPIC.fullmatch(topic):
        raise TransportError(f"Expected an absolute topic like '/arm/joint_states', found '{topic}'.")
    return topic


def dds_topic(topic: str) -> str:
    """The topic of DDS: "/joint_states" is "rt/joint_states"."""
    return f"rt{checked(topic)}"


def dds_type(kind: type[Message]) -> str:
    """The type name of DDS: "sensor_msgs/msg/JointState" is "sensor_msgs::msg::dds_::JointState_"."""
    package, middle, name = kind.ros_name.split("/")
    return f"{package}::{middle}::dds_::{name}_"


def ros1_type(kind: type[Message]) -> str:
    """The type name of ROS 1: "sensor_msgs/msg/JointState" is "sensor_msgs/JointState"."""
    package, _, name = kind.ros_name.split("/")
    return f"{package}/{name}"
