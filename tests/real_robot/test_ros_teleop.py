"""Tests of input devices on ROS topics, over the loopback transport."""

from collections.abc import Iterator

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy.teleop.contract import SUCCESS
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


def joy(axes=(0.0,) * 4, buttons=()) -> Joy:
    pressed = np.zeros(17)
    pressed[list(buttons)] = 1
    return Joy(axes=np.array(axes), buttons=pressed)


def test_a_joy_message_is_a_gamepad(network):
    device = JoyTeleop(LoopbackTransport(DOMAIN), "/joy")
    assert not device.read(0.0).enabled
    publisher = network.advertise("/joy", Joy, SENSOR)
    publisher.publish(joy([0.25, -0.5, 0.75, 1.0], [5, 6, 3]))
    command = device.read(0.0)
    assert command.enabled and command.gripper == 1 and command.events == (SUCCESS,) and command.stamp > 0
    assert command.twist.tolist() == [0.5, -0.25, -1.0, 0, 0, -0.75]
    assert device.read(0.0).events == (), "a held button is no new event"
    publisher.publish(Joy(axes=np.zeros(2), buttons=np.zeros(17)))
    assert not device.read(0.0).enabled and device.malformed == 1
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
