"""Tests of connection settings: transports from YAML and the command line, which takes precedence."""

import argparse
from dataclasses import replace
from typing import Any

import pytest

from robopolicy.errors import UserError
from robopolicy_robots import connection
from robopolicy_robots.robot import RobotSpec, load_robot
from robopolicy_robots.transports.base import ros_domain


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    connection.add_options(parser)
    return parser.parse_args(words)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Record the transports to open and their settings instead of opening them."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(connection, "open_transport", lambda name, **settings: found.append((name, settings)))
    return found


def robot(**changes: Any) -> RobotSpec:
    return replace(load_robot("sim_panda"), **changes)


def test_command_line_settings_override_the_robot_description(opened: list[tuple[str, dict[str, Any]]]) -> None:
    behind = robot(transport="rosbridge", domain=7, transport_options={"rosbridge": {"url": "ws://a:1", "ros1": True}})
    connection.connect(arguments(), behind)
    connection.connect(arguments("--connect", "url=ws://b:2", "--connect", "timeout=2.5"), behind)
    connection.connect(arguments("--transport", "dds"), behind)
    connection.connect(
        arguments("--transport", "zenoh", "--domain", "9", "--connect", "router=tcp/127.0.0.1:7447"), behind
    )
    assert opened == [
        ("rosbridge", {"url": "ws://a:1", "ros1": True}),
        ("rosbridge", {"url": "ws://b:2", "ros1": True, "timeout": 2.5}),
        ("dds", {"domain": 7}),
        ("zenoh", {"domain": 9, "router": "tcp/127.0.0.1:7447"}),
    ]
    assert behind.transport_options == {"rosbridge": {"url": "ws://a:1", "ros1": True}}


def test_the_environment_sets_the_default_domain(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    connection.connect(arguments("--transport", "dds"), robot())
    assert opened == [("dds", {})]
    for text, domain in (("", 0), ("7", 7)):
        monkeypatch.setenv("ROS_DOMAIN_ID", text)
        assert ros_domain(None) == domain and ros_domain(3) == 3
    for text in ("233", "-1", "seven"):
        monkeypatch.setenv("ROS_DOMAIN_ID", text)
        with pytest.raises(UserError, match=f"A ROS_DOMAIN_ID is a number from 0 to 232, got '{text}'"):
            ros_domain(None)


def test_lerobot_receives_the_robot(opened: list[tuple[str, dict[str, Any]]]) -> None:
    arm = load_robot("so101")
    camera = "cameras={front: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}}"
    connection.connect(arguments("--transport", "lerobot", "--connect", "port=/dev/ttyUSB1", "--connect", camera), arm)
    ((name, settings),) = opened
    assert name == "lerobot" and settings["robot"] is arm and settings["type"] == "so101_follower"
    assert settings["port"] == "/dev/ttyUSB1" and settings["cameras"]["front"]["fps"] == 30


def test_to_argv_round_trips_the_arguments() -> None:
    args = arguments("--transport", "dds", "--domain", "3", "--connect", "interface=lo")
    assert vars(arguments(*connection.to_argv(args))) == vars(args)


def test_invalid_settings_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="must have the form KEY=VALUE, got 'interface'"):
        connection.connect(arguments("--connect", "interface"), robot())
    with pytest.raises(UserError, match=r"Cannot read the setting '\{'"):
        connection.connect(arguments("--connect", "interface={"), robot())
    with pytest.raises(UserError, match=r"Unknown setting 'interfac' of transport dds\. Did you mean 'interface'"):
        connection.connect(arguments("--transport", "dds", "--connect", "interfac=lo"), robot())
    with pytest.raises(UserError, match=r"sim_panda: Unknown transport 'dsd'\. Did you mean 'dds'"):
        robot(transport="dsd")
    with pytest.raises(UserError, match="sim_panda: Unknown transport 'rosbrige'"):
        robot(transport_options={"rosbrige": {}})
    with pytest.raises(UserError, match="transport_options must have the form"):
        robot(transport_options={"rosbridge": "ws://a:1"})
