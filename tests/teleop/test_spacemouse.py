"""Tests of the SpaceMouse with HID reports from a list, read by the device class of pyspacemouse."""

import struct

import pytest

from robopolicy.errors import UserError

pytest.importorskip("pyspacemouse", reason="needs robopolicy[spacemouse]")
import pyspacemouse

from robopolicy.teleop.contract import MAX_AGE, DeadManSwitch
from robopolicy.teleop.devices import open_device
from robopolicy.teleop.spacemouse import SpaceMouseTeleop


class Reports(list):
    """HID device."""

    def read(self, *_, **__) -> bytes:
        return self.pop(0) if self else b""

    def close(self) -> None:
        self.clear()


def motion(*axes: int) -> bytes:
    """Report of six axes from -350 to 350: x right, y back, z down, and rotations."""
    return bytes([1]) + struct.pack("<6h", *axes)


@pytest.fixture
def mouse():
    reports = Reports()
    spec = pyspacemouse.get_device_specs()["SpaceMouseCompact"]
    spec = pyspacemouse.apply_axis_convention(spec, pyspacemouse.AxisConvention.ROS)
    return reports, SpaceMouseTeleop(pyspacemouse.SpaceMouseDevice(spec, reports))


def test_the_newest_of_several_reports_is_used(mouse):
    reports, device = mouse
    reports += [motion(0, -350, 0, 0, 0, 0), motion(0, -175, 0, 0, 0, 0)]
    command = device.read(5.0)
    assert command.twist.tolist() == pytest.approx([0.5, 0, 0, 0, 0, 0]) and command.enabled and command.stamp == 5.0
    reports.append(motion(0, 0, 0, 0, 0, 0))
    assert not device.read(5.1).enabled, "the cap has sprung back"


def test_axes_become_old_without_reports(mouse):
    reports, device = mouse
    switch = DeadManSwitch(springs_back=device.springs_back)
    reports.append(motion(0, -350, 0, 0, 0, 0))
    assert switch.check(device.read(5.0), 5.0).enabled
    later = 5.0 + MAX_AGE + 0.01
    assert not switch.check(device.read(later), later).enabled, "a lost device keeps its last axes"


def test_buttons_move_the_gripper(mouse):
    reports, device = mouse
    reports.append(bytes([3, 1]))
    assert device.read(5.0).gripper == 1 and device.read(5.0).enabled
    reports.append(bytes([3, 2]))
    assert device.read(5.1).gripper == -1


def test_a_missing_device_is_reported():
    with pytest.raises(UserError, match="No SpaceMouse can be opened"):
        open_device("spacemouse")
