"""Batched forward kinematics, Jacobian and differential inverse kinematics of the Franka Panda.

All operations are elementwise over the batch or one small LAPACK call per row, so the result of a row does not depend
on the number of rows. `forward` and `inverse_downward` also take torch tensors, for which `panda_kernels` computes
them. The base frame is the mount of the robot, the world frame of the scenes. The tool frame (TCP) is between the
finger pads, with z pointing out of the hand and y along the opening direction of the fingers.

Source of the parameters: Franka Control Interface documentation, modified Denavit-Hartenberg table after Craig and
joint limits of the Panda.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import namespace

Array = NDArray[np.float64]

JOINT_LOW: Array = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])  # [rad]
JOINT_HIGH: Array = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])  # [rad]
JOINT_VELOCITY: Array = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])  # [rad/s]
FINGER_TRAVEL = 0.04  # [m] per finger, the gripper opens to 0.08 m

# Per joint: offset a along the previous x [m], offset d along z [m], twist about the previous x [quarter turns].
DH = (
    (0.0, 0.333, 0),
    (0.0, 0.0, -1),
    (0.0, 0.316, 1),
    (0.0825, 0.0, 1),
    (-0.0825, 0.384, -1),
    (0.0, 0.0, 1),
    (0.088, 0.0, 1),
)
TOOL_OFFSET = 0.107 + 0.1034  # [m] flange, then TCP of the hand
_HAND_ANGLE = -np.pi / 4  # [rad] rotation of the hand about the flange axis
ITERATIONS, DAMPING = 2, 0.02  # of the inverse kinematics in a control step
COS_HAND, SIN_HAND = float(np.cos(_HAND_ANGLE)), float(np.sin(_HAND_ANGLE))


class Pose(NamedTuple):
    """Tool poses in the base frame."""

    position: Array  # (N, 3) [m]
    rotation: Array  # (N, 3, 3), columns are the tool's axes

    @property
    def yaw(self) -> Array:
        """(N,) heading of the tool's x axis about the vertical [rad]."""
        return namespace(self.rotation).arctan2(self.rotation[:, 1, 0], self.rotation[:, 0, 0])


def forward(q: Array) -> Pose:
    """Tool pose at joint positions `q` `(N, 7)`."""
    return _chain(q)[0] if isinstance(q, np.ndarray) else Pose(*_kernels().panda_forward(q))


def jacobian(q: Array) -> tuple[Pose, Array]:
    """Tool pose and geometric Jacobian `(N, 6, 7)`: linear rows [m/rad], then angular rows [rad/rad]."""
    pose, origins, axes = _chain(q)
    return pose, np.concatenate([cross(axes, pose.position[:, :, None] - origins), axes], axis=1)


def downward(yaw: Array) -> Array:
    """Rotations `(N, 3, 3)` of a tool that points straight down with heading `yaw` `(N,)`."""
    cos, sin, zero = np.cos(yaw), np.sin(yaw), np.zeros_like(yaw)
    rows = [np.stack(row, axis=-1) for row in ((cos, sin, zero), (sin, -cos, zero), (zero, zero, zero - 1.0))]
    return np.stack(rows, axis=1)


def inverse_downward(q: Array, position: Array, yaw: Array, posture: Array) -> Array:
    """Move `q` `(N, 7)` [rad] towards tools at `position` `(N, 3)` [m] that point down with heading `yaw` `(N,)`."""
    if isinstance(q, np.ndarray):
        return inverse(q, Pose(position, downward(yaw)), posture)
    return _kernels().panda_inverse(q, position, yaw, posture.tolist())


def inverse(q: Array, target: Pose, posture: Array, *, iterations: int = ITERATIONS, damping: float = DAMPING) -> Array:
    """Move `q` `(N, 7)` [rad] towards `target` by damped least squares (Wampler 1986), within the joint limits.

    Args:
        q: Initial joint positions [rad].
        target: Tool poses, less than a quarter turn away.
        posture: Joint positions `(7,)` that attract the redundant degree of freedom.
        iterations: Newton steps; two are enough if called in every control step.
        damping: Larger values are more stable near singularities and slower elsewhere.
    """
    regulariser = damping**2 * np.eye(6)
    for _ in range(iterations):
        pose, jac = jacobian(q)
        attraction = 0.1 * (posture - q)  # (N, 7)
        error = np.concatenate(
            [target.position - pose.position, rotation_error(pose.rotation, target.rotation)], axis=1
        )
        error = error - (jac @ attraction[:, :, None])[:, :, 0]
        force = np.linalg.solve(jac @ jac.mT + regulariser, error[:, :, None])  # (N, 6, 1)
        q = np.clip(q + attraction + (jac.mT @ force)[:, :, 0], JOINT_LOW, JOINT_HIGH)
    return q


def rotation_error(current: Array, target: Array) -> Array:
    """Rotation vectors `(N, 3)` from `current` to `target` `(N, 3, 3)`, exact to first order (sine of the angle)."""
    return 0.5 * cross(current, target).sum(axis=2)


def cross(a: Array, b: Array) -> Array:
    """Cross products of column vectors: `(N, 3, K)` times `(N, 3, K)`."""
    rows = [a[:, i] * b[:, j] - a[:, j] * b[:, i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.stack(rows, axis=1)


def _chain(q: Array) -> tuple[Pose, Array, Array]:
    """Tool pose, joint origins `(N, 3, 7)` and joint axes `(N, 3, 7)`."""
    q = np.ascontiguousarray(q)  # numpy's sine of a strided array may differ in the last bit
    cos, sin = np.cos(q)[:, :, None], np.sin(q)[:, :, None]  # (N, 7, 1)
    x, y, z = (np.broadcast_to(axis, (len(q), 3)) for axis in np.eye(3))
    position = np.zeros_like(x)
    origins, axes = [], []
    for joint, (a, d, twist) in enumerate(DH):
        position = position + a * x
        if twist:
            y, z = twist * z, -twist * y
        position = position + d * z
        x, y = cos[:, joint] * x + sin[:, joint] * y, cos[:, joint] * y - sin[:, joint] * x
        origins.append(position)
        axes.append(z)
    x, y = COS_HAND * x + SIN_HAND * y, COS_HAND * y - SIN_HAND * x
    pose = Pose(position + TOOL_OFFSET * z, np.stack([x, y, z], axis=2))
    return pose, np.stack(origins, axis=2), np.stack(axes, axis=2)


def _kernels() -> Any:
    """Kernels of Warp, without which no torch tensors arrive here."""
    from robopolicy_tasks.manipulation import panda_kernels

    return panda_kernels
