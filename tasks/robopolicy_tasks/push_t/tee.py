"""Closed-form model of the T-shaped block and its motion under pushes.

gym-pusht sets every velocity to zero before each physics step and has no friction, so the block moves only while the
finger presses on it, along the contact normal n. An impulse j at r from the centre of mass gives the velocity j n / m
and the turning rate j (r x n) / I; j follows from equal velocities of contact point and finger. Shape, centre of mass
and inertia match gym-pusht and differ slightly from a homogeneous T.

Poses `(K, 3)` are the centre of mass x, y [px] and the angle [rad]. Points of the block are relative to its centre of
mass, in the axes of the block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CENTRE = np.array([0.0, 45.0])  # [px] centre of mass in the block coordinates of gym-pusht
OUTLINE: Array = (
    np.array([[-60, 0], [60, 0], [60, 30], [15, 30], [15, 120], [-15, 120], [-15, 30], [-60, 30]]) - CENTRE
)  # (8, 2) [px] consecutive corners
HULL = (0, 1, 2, 4, 5, 7)  # corners of the convex hull
INNER = (3, 6)  # corners between bar and stem
INERTIA = 3000.0  # [px^2] moment of inertia divided by the mass
FINGER = 15.0  # [px] radius
_EDGES = np.roll(OUTLINE, -1, axis=0) - OUTLINE  # (8, 2)


def _rotation(angle: Array) -> Array:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)  # (K, 2, 2)


def pose_of(position: Array, angle: float) -> Array:
    """Pose `(3,)` of a block at gym-pusht's `position` `(2,)` and `angle`."""
    centre = position + CENTRE @ _rotation(np.array([angle]))[0].T
    return np.array([*centre, angle])


GOAL: Array = pose_of(np.array([256.0, 256.0]), np.pi / 4)


def to_world(points: Array, pose: Array) -> Array:
    """Points of the block `(K, P, 2)` or `(P, 2)` in the arena, `(K, P, 2)` for poses `(K, 3)`."""
    return points @ _rotation(pose[:, 2]).transpose(0, 2, 1) + pose[:, None, :2]


def to_block(points: Array, pose: Array) -> Array:
    """Points of the arena `(K, P, 2)` or `(P, 2)` in block coordinates, `(K, P, 2)` for poses `(K, 3)`."""
    return (points - pose[:, None, :2]) @ _rotation(pose[:, 2])


def closest(points: Array) -> Array:
    """Closest point of the outline to each of the points of the block `(..., 2)`."""
    along = ((points[..., None, :] - OUTLINE) * _EDGES).sum(-1) / np.square(_EDGES).sum(-1)
    found = OUTLINE + np.clip(along, 0.0, 1.0)[..., None] * _EDGES  # (..., 8, 2)
    best = np.square(found - points[..., None, :]).sum(-1).argmin(-1)
    return np.take_along_axis(found, best[..., None, None], -2)[..., 0, :]


def clearance(points: Array) -> Array:
    """Distance `(...)` [px] of points of the block `(..., 2)` to its outline."""
    return np.sqrt(np.square(closest(points) - points).sum(-1))


def error(pose: Array) -> Array:
    """Root mean square distance `(K,)` [px] of the corners from their targets."""
    off = to_world(OUTLINE, pose) - to_world(OUTLINE, GOAL[None])
    return np.sqrt(np.square(off).sum(-1).mean(-1))


def resolve_contact(pose: Array, finger: Array) -> Array:
    """Poses `(K, 3)` of the blocks after resolving their contact with the finger at `(K, 2)`."""
    local = to_block(finger[:, None], pose)[:, 0]
    contact = closest(local)
    normal = contact - local
    gap = np.sqrt(np.square(normal).sum(-1))
    normal /= np.maximum(gap, 1e-9)[:, None]
    lever = contact[:, 0] * normal[:, 1] - contact[:, 1] * normal[:, 0]
    impulse = np.maximum(FINGER - gap, 0.0) / (1.0 + lever**2 / INERTIA)
    shift = np.einsum("kij,kj->ki", _rotation(pose[:, 2]), normal) * impulse[:, None]
    return pose + np.concatenate([shift, (impulse * lever / INERTIA)[:, None]], 1)


def push(pose: Array, finger: Array, direction: Array, length: float, stride: float) -> Array:
    """Poses `(S, K, 3)` along straight strokes of the finger from `(K, 2)` in unit `direction` `(K, 2)`.

    There are S = length / stride poses, one every `stride` [px].
    """
    poses: list[Array] = []
    for _ in range(round(length / stride)):
        finger = finger + stride * direction
        pose = resolve_contact(pose, finger)
        poses.append(pose)
    return np.stack(poses)
