"""Tests of the rules of commands: dead-man switch, ages, neutral axes, and bad numbers."""

from dataclasses import replace

import numpy as np
import pytest

from robopolicy.teleop.contract import AXES, MAX_AGE, DeadManSwitch, TeleopCommand, deflection, read_numbers, shape

FORWARD = np.array([1.0, 0, 0, 0, 0, 0])


def held(twist=FORWARD, stamp=10.0, **fields) -> TeleopCommand:
    return TeleopCommand(True, np.asarray(twist, float), stamp=stamp, **fields)


def ready(**options) -> DeadManSwitch:
    """A switch that is held with neutral axes."""
    switch = DeadManSwitch(**options)
    assert switch.check(held(np.zeros(6)), 10.0).enabled
    return switch


def test_nothing_moves_without_the_switch():
    checked = ready().check(replace(held(), enabled=False, gripper=1.0), 10.0)
    assert not checked.enabled and not checked.twist.any() and checked.gripper == 0


def test_motion_starts_only_after_neutral_axes():
    switch = DeadManSwitch()
    assert not switch.check(held(), 10.0).enabled
    assert switch.check(held(np.full(6, 0.09)), 10.0).enabled
    assert switch.check(held(), 10.0).twist.tolist() == FORWARD.tolist()
    assert not switch.check(replace(held(), enabled=False), 10.0).enabled
    assert not switch.check(held(), 10.0).enabled, "held again with a deflected stick"


def test_a_device_that_springs_back_starts_deflected():
    assert DeadManSwitch(springs_back=True).check(held(), 10.0).enabled


@pytest.mark.parametrize(
    ("age", "enabled"), [(0.0, True), (MAX_AGE - 0.01, True), (MAX_AGE + 0.01, False), (-0.01, False)]
)
def test_old_commands_and_commands_from_the_future_let_go(age, enabled):
    switch = ready()
    assert switch.check(held(stamp=10.0), 10.0 + age).enabled is enabled
    assert switch.rejected == (age < 0)


def test_a_command_that_was_never_received_is_old():
    assert not ready().check(TeleopCommand(True), 10.0).enabled


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_let_go(bad):
    switch = ready()
    assert not switch.check(held([0, 0, bad, 0, 0, 0]), 10.0).enabled
    assert not switch.check(held(np.zeros(6), gripper=bad), 10.0).enabled
    assert not switch.check(held(np.zeros(6), joints={"elbow": bad}), 10.0).enabled
    assert switch.rejected == 3


def test_axes_outside_the_range_are_clipped_and_counted():
    switch = ready()
    assert switch.check(held([3, -2, 0, 0, 0, 0], gripper=9), 10.0).twist.tolist() == [1, -1, 0, 0, 0, 0]
    assert switch.clipped == 1


def test_events_pass_without_the_switch():
    assert DeadManSwitch().check(TeleopCommand(events=("success",)), 10.0).events == ("success",)


def test_the_shape_is_zero_in_the_dead_zone_and_cubic_outside():
    assert shape(np.array([0.0, 0.1, -0.1, 1.0, -1.0])).tolist() == [0, 0, 0, 1, -1]
    assert shape(np.array([0.55]))[0] == pytest.approx(0.125)  # half of the way beyond the dead zone, cubed
    speeds = np.linspace(-1, 1, len(AXES))
    assert shape(deflection(speeds)) == pytest.approx(speeds)


@pytest.mark.parametrize("values", [None, 3, "123", [1, 2], [1, 2, True], [1, 2, "3"], [1, 2, None], {0: 1}])
def test_other_values_than_numbers_are_no_axes(values):
    assert read_numbers(values, 3) is None
    assert read_numbers([1, 2.5, -3, "rest"], 3).tolist() == [1, 2.5, -3]
