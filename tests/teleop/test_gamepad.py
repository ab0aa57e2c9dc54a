"""Tests of the gamepad with the virtual joystick of SDL: sticks, switch, events, and unplugging."""

from collections.abc import Iterator

import numpy as np
import pytest

from robopolicy.errors import UserError

pytest.importorskip("pygame", reason="needs robopolicy[gamepad]")
from benchmarks.virtual_gamepad import VirtualGamepad
from robopolicy.teleop.contract import DISCARD, SUCCESS, deflection
from robopolicy.teleop.devices import open_device


@pytest.fixture
def pad() -> Iterator[VirtualGamepad]:
    gamepad = VirtualGamepad()
    yield gamepad
    gamepad.unplug()


def test_sticks_and_cross_give_the_twist(pad):
    device = open_device(f"gamepad:{pad.index}")
    assert not device.read(1.0).twist.any()
    pad.twist(np.array([0.5, -0.2, 1.0, -1.0, 1.0, 0.1]))
    command = device.read(1.0)
    expected = np.round(deflection(np.array([0.5, -0.2, 1.0, -1.0, 1.0, 0.1])) * 32767) / 32767
    np.testing.assert_allclose(command.twist, expected, atol=1e-6)
    assert command.stamp == 1.0 and not command.enabled
    pad.enable(True)
    assert device.read(1.0).enabled
    device.close()


def test_triggers_move_the_gripper_and_buttons_send_events_once(pad):
    device = open_device(f"gamepad:{pad.index}")
    pad.gripper(1)
    pad.press(SUCCESS)
    command = device.read(1.0)
    assert command.gripper == 1 and command.events == (SUCCESS,)
    pad.gripper(-1)
    pad.press(DISCARD)
    command = device.read(1.1)
    assert command.gripper == -1 and command.events == (DISCARD,), "the held button is no new event"
    pad.press(SUCCESS, held=False)
    device.read(1.2)
    pad.press(SUCCESS)
    assert device.read(1.3).events == (SUCCESS,)
    device.close()


def test_an_unplugged_gamepad_lets_go(pad):
    device = open_device(f"gamepad:{pad.index}")
    pad.twist(np.ones(6))
    pad.enable(True)
    assert device.read(1.0).enabled
    pad.unplug()
    command = device.read(1.1)
    assert not command.enabled and not command.twist.any()


def test_missing_gamepads_are_reported():
    with pytest.raises(UserError, match="There is no gamepad 7"):
        open_device("gamepad:7")
    with pytest.raises(UserError, match="has a number, such as gamepad:1, got 'one'"):
        open_device("gamepad:one")
    with pytest.raises(UserError, match="Unknown device 'gamepat'"):
        open_device("gamepat")
