"""Connection to a robot: transport and settings, from the YAML file of the robot and the command line."""

from __future__ import annotations

import argparse
from typing import Any

from robopolicy.errors import UserError
from robopolicy.files import parse_yaml
from robopolicy_robots.robot import RobotSpec
from robopolicy_robots.transports.actions import ACTION_TRANSPORTS
from robopolicy_robots.transports.base import (
    Transport,
    has_actions,
    open_transport,
    transport_names,
    transport_settings,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add command-line options of the connection."""
    names = ", ".join(transport_names())
    parser.add_argument("--transport", help=f"{names} (default: the robot's, mostly dds)")
    parser.add_argument("--domain", type=int, help="ROS_DOMAIN_ID (default: the robot's)")
    setting = "transport setting, e.g. interface=eth0, url=ws://HOST:9090, port=/dev/ttyACM0; may be repeated"
    parser.add_argument("--connect", action="append", default=[], metavar="KEY=VALUE", help=setting)


def to_argv(args: argparse.Namespace) -> list[str]:
    """Command-line arguments of the connection, for another process."""
    domain = [] if args.domain is None else ["--domain", str(args.domain)]
    return ["--transport", args.transport, *domain, *(text for each in args.connect for text in ("--connect", each))]


def connect(args: argparse.Namespace, robot: RobotSpec) -> Transport:
    """Open the transport given by `args`, else the one of the robot.

    Raises:
        TransportError: The transport cannot be opened.
        UserError: The transport or a setting is unknown.
    """
    name = args.transport or robot.transport
    settings: dict[str, Any] = dict(robot.transport_options.get(name, {}))
    for text in args.connect:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"A transport setting must have the form KEY=VALUE, got '{text}'.")
        settings[key] = _value(value)
    known = transport_settings(name)
    if robot.uses_action and not has_actions(name):
        raise UserError(
            f"The transport {name} has no actions, and {robot.name} takes {robot.command.type}: choose the transport "
            f"{' or '.join(ACTION_TRANSPORTS)}, or the controller's topic 'joint_trajectory'."
        )
    if "domain" in known:
        if robot.domain is not None:
            settings.setdefault("domain", robot.domain)
        if args.domain is not None:
            settings["domain"] = args.domain
    if "robot" in known:
        settings["robot"] = robot
    return open_transport(name, **settings)


def _value(text: str) -> Any:
    """Parse a YAML value: a number, true or false, a map, or text."""
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"Cannot read the setting '{text}': {error}.") from error
