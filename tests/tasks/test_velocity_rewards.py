"""Tests of velocity rewards against hand-computed values: a slow command and a command to stand."""

import numpy as np
import pytest

from robopolicy_tasks.velocity import rewards
from robopolicy_tasks.velocity.motion import BaseMotion
from robopolicy_tasks.velocity.rewards import ControlStep


def joints(*rows: list[float]) -> np.ndarray:
    """Returns `(N, 12)` joint values: the given ones for the first leg, 0 for the other legs."""
    return np.array([row + [0.0] * 9 for row in rows])


STEP = ControlStep(
    BaseMotion(
        velocity=np.array([[0.62, -0.3, 0.2], [0.05, 0.5, -0.3]]),
        turning=np.array([[1.0, 2.0, 0.59], [0.0, 1.0, 1.0]]),
        gravity=np.array([[0.6, 0.0, -0.8], [0.3, 0.4, -np.sqrt(0.75)]]),
        height=np.array([0.3, 0.3]),
        joints=np.zeros((2, 12)),
        speeds=joints([2.0, -3.0, 1.0], [-1.0, 5.0, 5.0]),
        contact=np.array([[True, True, False, True], [False, False, True, False]]),
        foot_height=np.array([[0.09, 0.19, 0.0, 0.5], [0.29, 0.5, 0.09, 0.0]]),
        foot_speed=np.array([[1.0, 2.0, 3.0, 0.0], [1.0, 0.0, 0.5, 0.0]]),
    ),
    command=np.array([[0.12, 0.0, 0.09], [0.05, 0.0, 0.0]]),  # of norm 0.15 and 0.05
    action=joints([1.0, 2.0, 0.0], [1.0, 0.0, 0.0]),
    last_action=joints([0.5, -1.0, 0.0], [1.0, 0.0, 0.0]),
    torque=joints([1.0, 2.0, 0.0], [3.0, 0.0, 0.0]),
    air_time=np.array([[0.2, 0.6, 0.3, 0.0], [0.3, 0.3, 0.3, 0.3]]),
    offset=joints([0.1, 0.2, 0.0], [0.3, 0.0, -0.4]),
)
TERMS = {
    "track_lin_vel": [np.exp(-(0.25 + 0.09) / 0.25), np.exp(-0.25 / 0.25)],
    "track_ang_vel": [np.exp(-0.25 / 0.25), np.exp(-1.0 / 0.25)],
    "lin_vel_z_l2": [0.04, 0.09],
    "ang_vel_xy_l2": [1.0 + 4.0, 1.0],
    "flat_orientation_l2": [0.36, 0.09 + 0.16],
    "torque": [1.0 + 4.0, 9.0],
    "power": [2.0 + 6.0, 3.0],
    "action_rate": [0.25 + 9.0, 0.0],
    "joint_deviation_l2": [0.01 + 0.1 * 0.04, 0.09 + 0.1 * 0.16],
    "stand_still": [0.0, 0.3 + 0.4],
    "feet_air_time": [(0.2 - 0.12) + (0.4 - 0.12), 0.0],
    "feet_slip": [1.0 + 4.0, 0.25],
    "foot_clearance": [0.0 + 0.1 * 2.0 + 0.09 * 3.0, 0.2],
}


@pytest.mark.parametrize("term", [*rewards.TRACKING, *rewards.STYLE], ids=lambda term: term.__name__)
def test_each_term_equals_the_hand_computed_value(term) -> None:
    np.testing.assert_allclose(term(STEP), TERMS[term.__name__], rtol=1e-12, atol=1e-12)


def test_totals_equal_the_weighted_sums_of_terms() -> None:
    np.testing.assert_allclose(rewards.total(rewards.TRACKING, STEP)[1], np.exp(-1.0) + 0.5 * np.exp(-4.0))
    costs = 0.04 + 0.05 * 5 + 2.5 * 0.36 + 2e-4 * 5 + 1e-3 * 8 + 0.01 * 9.25 + 0.5 * 0.014 + 0.1 * 5 + 0.5 * 0.47
    np.testing.assert_allclose(rewards.total(rewards.STYLE, STEP)[0], 5.0 * 0.36 - costs)
