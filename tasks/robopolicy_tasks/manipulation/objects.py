"""Geometry of free bodies for tasks and experts."""

from __future__ import annotations

import numpy as np

from robopolicy.sim.backends.mujoco.task import Array, namespace


def upright(x: float, y: float, z: float, yaw: float) -> Array:
    """Free-joint coordinates `(7,)` of an upright body at x, y, z [m] with heading `yaw` [rad]."""
    return np.array([x, y, z, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])


def rotation_6d(quaternion: Array) -> Array:
    """First two columns of the rotation matrices `(N, 6)` of unit quaternions `(N, 4)` (w, x, y, z)."""
    w, x, y, z = quaternion.T
    first = (1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y))
    second = (2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x))
    return namespace(quaternion).stack([*first, *second], axis=1)


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
