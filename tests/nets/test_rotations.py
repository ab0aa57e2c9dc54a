"""Tests of rotations: matrices by hand, the inverse of every type, signs of quaternions and angles beyond pi."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from robopolicy.nets.rotations import SIZES, deviation, from_matrix, to_matrix

HALF = math.sqrt(0.5)
QUARTER_TURN = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # about z: x becomes y
STORED = {
    "axis_angle": [0.0, 0.0, math.pi / 2],
    "quaternion_xyzw": [0.0, 0.0, HALF, HALF],
    "quaternion_wxyz": [HALF, 0.0, 0.0, HALF],
    "rot6d": [0.0, 1.0, 0.0, -1.0, 0.0, 0.0],
    "rot6d_rows": [0.0, -1.0, 0.0, 1.0, 0.0, 0.0],
}


def random_rotations(count: int) -> Rotation:
    """Rotations of all angles, with the identity and half turns about the axes at the end."""
    turns = [Rotation.from_rotvec(np.zeros((1, 3))), Rotation.from_rotvec(math.pi * np.eye(3))]
    return Rotation.concatenate([Rotation.from_quat(np.random.default_rng(0).normal(size=(count, 4))), *turns])


@pytest.mark.parametrize("kind", SIZES)
def test_a_quarter_turn_is_as_by_hand(kind: str) -> None:
    stored = torch.tensor(STORED[kind])
    torch.testing.assert_close(to_matrix(stored, kind), QUARTER_TURN)
    torch.testing.assert_close(from_matrix(QUARTER_TURN, kind), stored)


@pytest.mark.parametrize("kind", SIZES)
def test_every_type_inverts_to_the_same_rotation(kind: str) -> None:
    """Also where the real part of the quaternion is 0, and compared with the types that SciPy has."""
    rotations = random_rotations(200)
    matrix = torch.from_numpy(rotations.as_matrix())
    stored = from_matrix(matrix, kind)
    assert stored.shape == (204, SIZES[kind]) and deviation(stored, kind) < 1e-12
    torch.testing.assert_close(to_matrix(stored, kind), matrix, atol=1e-12, rtol=0)
    if kind == "axis_angle":
        assert stored.norm(dim=-1).max() <= math.pi + 1e-12
        np.testing.assert_allclose(stored[:201], rotations[:201].as_rotvec(), atol=1e-12)
    if kind == "quaternion_xyzw":
        np.testing.assert_allclose(stored[:201], rotations[:201].as_quat(canonical=True), atol=1e-12)


def test_the_nearest_of_equal_rotations_is_returned() -> None:
    quaternion = torch.tensor(STORED["quaternion_xyzw"])
    for sign in (1, -1):
        near = sign * torch.tensor([0.0, 0.1, 0.7, 0.7])
        torch.testing.assert_close(from_matrix(QUARTER_TURN, "quaternion_xyzw", near), sign * quaternion)
    for angle in (3.1, 3.2, -3.2, 9.0):  # the measured rotation is 0.1 rad behind
        target = torch.tensor([0.0, angle, 0.0])
        found = from_matrix(to_matrix(target, "axis_angle"), "axis_angle", torch.tensor([0.0, angle - 0.1, 0.0]))
        torch.testing.assert_close(found, target)
    wrapped = from_matrix(to_matrix(torch.tensor([0.0, 3.2, 0.0]), "axis_angle"), "axis_angle")
    torch.testing.assert_close(wrapped, torch.tensor([0.0, 3.2 - 2 * math.pi, 0.0]))


def test_predicted_axes_become_orthogonal() -> None:
    """The second axis loses its part along the first one (Zhou et al. 2019)."""
    matrix = to_matrix(torch.tensor([0.0, 3.0, 0.0, -2.0, 5.0, 0.0]), "rot6d")
    torch.testing.assert_close(matrix, QUARTER_TURN)


def test_values_that_are_no_rotations_deviate() -> None:
    assert deviation(torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.6, 0.6]]), "quaternion_xyzw") > 0.2
    assert deviation(torch.tensor([[1.0, 0.0, 0.0, 0.5, 0.5, 0.0]]), "rot6d") == 0.5
