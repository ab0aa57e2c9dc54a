"""Transports to a robot with the interface of `base`; one module each, imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robopolicy.plugins import Registry

if TYPE_CHECKING:
    from robopolicy_robots.transports.base import Transport

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transports",
    {
        "dds": "robopolicy_robots.transports.dds:DdsTransport",
        "lerobot": "robopolicy_robots.transports.lerobot:LerobotTransport",
        "loopback": "robopolicy_robots.transports.loopback:LoopbackTransport",
        "rclpy": "robopolicy_robots.transports.rclpy:RclpyTransport",
        "ros1": "robopolicy_robots.transports.ros1:Ros1Transport",
        "rosbridge": "robopolicy_robots.transports.rosbridge:RosbridgeTransport",
        "zenoh": "robopolicy_robots.transports.zenoh:ZenohTransport",
    },
)
"""Transports by name, imported on use; packages register theirs in the entry-point group `robopolicy.transports`."""
