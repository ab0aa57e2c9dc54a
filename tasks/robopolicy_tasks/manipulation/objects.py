"""Geometry of free bodies for tasks and experts."""

from __future__ import annotations

from robopolicy.sim.backends.mujoco.task import Array, namespace


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
