"""Tests of input devices on ROS topics, over the loopback transport."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy.teleop.contract import SUCCESS, DeadManSwitch
from robopolicy_robots.messages import Joy, Twist, Vector3
from robopolicy_robots.ros_teleop import JoyTeleop, TwistTeleop
from robopolicy_robots.transports.base import SENSOR
from robopolicy_robots.transports.loopback import LoopbackTransport

DOMAIN = 187


@pytest.fixture
def network() -> Iterator[LoopbackTransport]:
    transport = LoopbackTransport(DOMAIN)
    yield transport
    transport.close()


def joy(axes=(0.0,) * 6, buttons=()) -> Joy:
    pressed = np.zeros(21)
    pressed[list(buttons)] = 1
    return Joy(axes=np.array(axes), buttons=pressed)


def test_a_joy_message_is_a_gamepad(network):
    """Numbers and signs of `game_controller_node`: left and forward are positive, pressed triggers -1."""
    device = JoyTeleop(LoopbackTransport(DOMAIN), "/joy")
    assert not device.read(0.0).enabled
    publisher = network.advertise("/joy", Joy, SENSOR)
    right_shoulder, upper_button, cross_up = 10, 3, 11
    publisher.publish(joy([0.25, 0.5, -0.75, 1.0, -1.0, 0.0], [right_shoulder, upper_button, cross_up]))
    command = device.read(time.monotonic())
    assert command.enabled and command.gripper == 1 and command.events == (SUCCESS,) and command.stamp > 0
    assert command.twist.tolist() == [0.5, 0.25, 1.0, 0, 1.0, -0.75]
    assert device.read(0.0).events == (), "a held button is no new event"
    publisher.publish(joy(buttons=[5]))
    assert not device.read(0.0).enabled, "the guide button"
    publisher.publish(Joy(axes=np.zeros(2), buttons=np.zeros(17)))
    assert not device.read(0.0).enabled and device.malformed == 1
    device.close()


@pytest.mark.parametrize("kind, topic", [(JoyTeleop, "/joy"), (TwistTeleop, "/cmd_vel")])
def test_a_message_that_arrives_during_the_read_moves(kind, topic, network):
    """DDS and Zenoh stamp a message when it is polled, after the time of the tick."""
    device, switch = kind(LoopbackTransport(DOMAIN), topic), DeadManSwitch(springs_back=True)
    now = time.monotonic()
    message = joy([0, 1.0, 0, 0, 0, 0], [10]) if kind is JoyTeleop else Twist(Vector3(1.0, 0.0, 0.0))
    network.advertise(topic, type(message), SENSOR).publish(message)
    command = switch.check(device.read(now), now)
    assert command.enabled and command.twist[0] == 1.0 and command.stamp == now and switch.rejected == 0
    device.close()


def test_a_twist_moves_until_it_is_zero(network):
    device = TwistTeleop(LoopbackTransport(DOMAIN), "/cmd_vel")
    publisher = network.advertise("/cmd_vel", Twist, SENSOR)
    publisher.publish(Twist(Vector3(0.5, 0.0, -0.25), Vector3(0.0, 0.0, 1.0)))
    command = device.read(0.0)
    assert command.enabled and command.twist.tolist() == [0.5, 0, -0.25, 0, 0, 1]
    publisher.publish(Twist())
    assert not device.read(0.0).enabled
    device.close()


@pytest.mark.parametrize("argument", ["", "joy", "dds:joy"])
def test_a_topic_is_required(argument):
    with pytest.raises(UserError, match="has a topic, such as joy:/joy"):
        JoyTeleop.open(argument)
