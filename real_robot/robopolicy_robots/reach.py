"""How a robot is reached: the transport and its settings, from the robot's YAML file and the command line."""

from __future__ import annotations

import argparse
from typing import Any

from robopolicy.errors import UserError
from robopolicy.files import parse_yaml
from robopolicy_robots.robot import RobotSpec
from robopolicy_robots.transports.base import TRANSPORTS, Transport, open_transport

DOMAINS = ("loopback", "dds", "zenoh", "rclpy")  # transports that are told a domain


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how a robot is reached."""
    names = ", ".join((*TRANSPORTS, "auto"))
    parser.add_argument("--transport", help=f"{names} (default: the robot's, mostly dds)")
    parser.add_argument("--domain", type=int, help="ROS_DOMAIN_ID (default: the robot's)")
    parser.add_argument(
        "--connect",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the transport, e.g. interface=eth0, url=ws://HOST:9090, port=/dev/ttyACM0; may be repeated",
    )


def repeated(args: argparse.Namespace) -> list[str]:
    """The options again, for a process that reaches the same robot."""
    domain = [] if args.domain is None else ["--domain", str(args.domain)]
    return ["--transport", args.transport, *domain, *(word for each in args.connect for word in ("--connect", each))]


def connect(args: argparse.Namespace, robot: RobotSpec) -> Transport:
    """Open the transport that `args` names, else the robot's own.

    Raises:
        TransportError: It cannot be opened.
        UserError: It or a setting is unknown.
    """
    name = args.transport or robot.transport
    settings: dict[str, Any] = dict(robot.connections.get(name, {}))
    for text in args.connect:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"A setting of a transport is written KEY=VALUE, got '{text}'.")
        settings[key] = _value(value)
    if name in DOMAINS:
        if robot.domain is not None:
            settings.setdefault("domain", robot.domain)
        if args.domain is not None:
            settings["domain"] = args.domain
    if name == "lerobot":
        settings["robot"] = robot
    return open_transport(name, **settings)


def _value(text: str) -> Any:
    """A value as the YAML file would have it: a number, true or false, a map, or else text."""
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"Cannot read the setting '{text}': {error}.") from error
