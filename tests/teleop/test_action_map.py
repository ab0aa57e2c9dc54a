"""Tests of the map from the axes of a twist to the dimensions of an action."""

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy.teleop.action_map import ActionMap

TWIST = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def values(mapping: ActionMap) -> list[float]:
    ones = np.ones(len(mapping.inputs))
    return mapping.action(TWIST, -1.0, -ones, ones).tolist()


def test_names_of_actions_give_the_axes():
    names = ("tool_dx [0.03 m]", "tool_dy [0.03 m]", "tool_dz [0.03 m]", "tool_dyaw [0.12 rad]", "gripper")
    assert values(ActionMap.of_task(names, 5)) == [0.1, 0.2, 0.3, 0.6, -1.0]
    assert values(ActionMap.of_task(("gripper_vx [m/s]", "gripper_vy [m/s]"), 2)) == [0.1, 0.2]
    assert values(ActionMap.of_task(("ax [m/s^2]", "ay [m/s^2]"), 2)) == [0.1, 0.2]


def test_the_number_of_dimensions_gives_the_axes_without_names():
    assert values(ActionMap.of_task((), 4)) == [0.1, 0.2, 0.3, -1.0]
    assert values(ActionMap.of_task(("motor0", "motor1"), 2)) == [0.1, 0.2]
    with pytest.raises(UserError, match="12 dimensions has no default map; pass --map with 12"):
        ActionMap.of_task((), 12)


def test_inputs_can_be_chosen_flipped_and_left_out():
    mapping = ActionMap.parse(["yaw-", "0", "gripper"], 3)
    assert mapping.action(TWIST, 1.0, np.array([0.0, 2, -1]), np.array([1.0, 4, 1])).tolist() == [0.2, 3.0, 1.0]


@pytest.mark.parametrize(("names", "message"), [(["x"], "2; got 1"), (["x", "why"], "Unknown input 'why'")])
def test_wrong_maps_are_reported(names, message):
    with pytest.raises(UserError, match=message):
        ActionMap.parse(names, 2)
