"""Poses of free bodies for tasks and experts, numpy or torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from robopolicy.sim.backends.mujoco.task import Array, constant

# The two products of elements of the quaternion (w, x, y, z) in each element of a rotation matrix, column by column.
_W, _X, _Y, _Z = range(4)
_FIRST = [[_Y, _X, _X, _X, _X, _Y, _X, _Y, _X], [_Y, _Y, _Z, _Y, _X, _Z, _Z, _Z, _X]]
_SECOND = [[_Z, _W, _W, _W, _Z, _W, _W, _W, _Y], [_Z, _Z, _Y, _Z, _Z, _X, _Y, _X, _Y]]
_FACTORS = np.stack([_FIRST, _SECOND], axis=1)  # (2 factors, 2 products, 9)
_SIGNS: Array = np.array([[-2.0, 2, 2, 2, -2, 2, 2, 2, -2], [-2.0, 2, -2, -2, -2, 2, 2, -2, -2]])
_OFFSETS: Array = np.array([1.0, -0.0, -0.0, -0.0, 1.0, -0.0, -0.0, -0.0, 1.0])  # -0.0 keeps the sign of zeros


def upright(x: Any, y: Any, z: float, yaw: Any) -> Array:
    """Free-joint coordinates `(..., 7)` of upright bodies at x, y, z [m] with heading `yaw` `(...)` [rad]."""
    zero = yaw - yaw
    return np.array([x, y, zero + z, np.cos(yaw / 2), zero, zero, np.sin(yaw / 2)]).T


def rotation_columns(quaternion: Array) -> Array:
    """Columns of the rotation matrices `(N, 9)` of unit quaternions `(N, 4)` (w, x, y, z)."""
    factors = quaternion[:, constant(_FACTORS, quaternion)]  # (N, 2, 2, 9)
    products = factors[:, 0] * factors[:, 1] * constant(_SIGNS, quaternion)
    return products[:, 0] + products[:, 1] + constant(_OFFSETS, quaternion)
