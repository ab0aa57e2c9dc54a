"""Geometry of free bodies for tasks and experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from robopolicy.sim.backends.mujoco.task import Array, constant, namespace

# Elements of the quaternion whose products are the first two columns of a rotation matrix, twice 6 products.
_W, _X, _Y, _Z = range(4)
_FACTORS = np.array(
    [[[_Y, _X, _X, _X, _X, _Y], [_Z, _W, _W, _W, _Z, _W]], [[_Y, _Y, _Z, _Y, _X, _Z], [_Z, _Z, _Y, _Z, _Z, _X]]]
)
_SIGNS: Array = np.array([[-2.0, 2.0, 2.0, 2.0, -2.0, 2.0], [-2.0, 2.0, -2.0, -2.0, -2.0, 2.0]])
_OFFSETS: Array = np.array([1.0, -0.0, -0.0, -0.0, 1.0, -0.0])  # -0.0 keeps the sign of zeros


def upright(x: Any, y: Any, z: float, yaw: Any) -> Array:
    """Free-joint coordinates `(..., 7)` of upright bodies at x, y, z [m] with heading `yaw` `(...)` [rad]."""
    zero = yaw - yaw
    return np.array([x, y, zero + z, np.cos(yaw / 2), zero, zero, np.sin(yaw / 2)]).T


def rotation_6d(quaternion: Array) -> Array:
    """First two columns of the rotation matrices `(N, 6)` of unit quaternions `(N, 4)` (w, x, y, z)."""
    factors = quaternion[:, constant(_FACTORS, quaternion)]  # (N, 2, 2, 6) of two products per element
    products = factors[:, 0] * factors[:, 1] * constant(_SIGNS, quaternion)
    return products[:, 0] + products[:, 1] + constant(_OFFSETS, quaternion)


def yaw_of(quaternion: Array) -> Array:
    """Heading `(N,)` [rad] of unit quaternions `(N, 4)`."""
    w, x, y, z = quaternion.T
    return namespace(quaternion).arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def distance(a: Array, b: Array) -> Array:
    """Euclidean distance `(N,)` between rows of `(N, D)`."""
    xp = namespace(a)
    return xp.sqrt(xp.square(a - b).sum(axis=1))


def nearness(length: Array, scale: float) -> Array:
    """Score that is 1 at distance 0 and decreases to 0 with `scale` [m]."""
    return 1.0 - namespace(length).tanh(length / scale)
