"""Motion of the robot, computed once per control step for observations and rewards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, BatchState
from robopolicy_tasks.velocity.scene import FEET

CONTACT = 1.0  # [N] minimum force at a foot in contact


class BaseMotion(NamedTuple):
    """Batched motion; vectors are in the frame of the robot unless stated otherwise."""

    velocity: Array  # (N, 3) [m/s]
    turning: Array  # (N, 3) [rad/s]
    gravity: Array  # (N, 3) direction of gravity, a unit vector; (0, 0, -1) while level
    height: Array  # (N,) [m] of the trunk
    joints: Array  # (N, 12) [rad]
    speeds: Array  # (N, 12) [rad/s]
    contact: NDArray[np.bool_]  # (N, 4) feet on the ground
    foot_height: Array  # (N, 4) [m] of the centres of the soles
    foot_speed: Array  # (N, 4) [m/s] along the ground, in the world frame


def read(state: BatchState) -> BaseMotion:
    """Compute the motion of `state`; foot sensors lag by one physics step."""
    rotation = matrix(state.qpos[:, 3:7])
    inverse = rotation.transpose(0, 2, 1)
    feet = np.stack([state.sensor(f"{foot}_velocity") for foot in FEET], 1)
    return BaseMotion(
        velocity=(inverse @ state.qvel[:, :3, None])[..., 0],
        turning=state.qvel[:, 3:6],
        gravity=-rotation[:, 2],
        height=state.qpos[:, 2],
        joints=state.qpos[:, 7:],
        speeds=state.qvel[:, 6:],
        contact=feet_on_ground(state),
        foot_height=np.stack([state.sensor(f"{foot}_position")[:, 2] for foot in FEET], 1),
        foot_speed=np.linalg.norm(feet[..., :2], axis=-1),
    )


def feet_on_ground(state: BatchState) -> NDArray[np.bool_]:
    """Mask `(N, 4)` of feet on the ground."""
    return np.concatenate([state.sensor(f"{foot}_touch") for foot in FEET], 1) > CONTACT


def matrix(quaternion: Array) -> Array:
    """Rotation matrices `(N, 3, 3)` of unit quaternions `(N, 4)`, w first."""
    w, x, y, z = quaternion.T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, -1) for row in rows], 1)
