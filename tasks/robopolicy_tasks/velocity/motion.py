"""Motion of the robot, computed once per control step for observations and rewards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, BatchState, namespace
from robopolicy_tasks.poses import rotation_columns
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
    xp, rotation, feet = namespace(state.qpos), matrix(state.qpos[:, 3:7]), _feet(state)
    return BaseMotion(
        velocity=_in_body_frame(rotation, state.qvel[:, :3]),
        turning=state.qvel[:, 3:6],
        gravity=-rotation[:, 2],
        height=state.qpos[:, 2],
        joints=state.qpos[:, 7:],
        speeds=state.qvel[:, 6:],
        contact=feet_on_ground(state),
        foot_height=feet[..., 3],
        foot_speed=xp.linalg.norm(feet[..., 4:6], axis=-1),
    )


def feet_on_ground(state: BatchState) -> NDArray[np.bool_]:
    """Mask `(N, 4)` of feet on the ground."""
    return _feet(state)[..., 0] > CONTACT


def matrix(quaternion: Array) -> Array:
    """Rotation matrices `(N, 3, 3)` of unit quaternions `(N, 4)`, w first."""
    return rotation_columns(quaternion).reshape(len(quaternion), 3, 3).mT


def _feet(state: BatchState) -> Array:
    """Sensors of the feet `(N, 4, 7)`: force [N], position [m] and velocity [m/s]."""
    start = int(state.model.sensor(f"{FEET[0]}_touch").adr[0])
    return state.sensordata[:, start : start + 7 * len(FEET)].reshape(len(state), len(FEET), 7)


def _in_body_frame(rotation: Array, vectors: Array) -> Array:
    """Vectors `(N, 3)` of the world in the frames of `rotation` `(N, 3, 3)`."""
    if isinstance(rotation, np.ndarray):
        return (rotation.mT @ vectors[:, :, None])[..., 0]
    return (rotation * vectors[:, :, None]).sum(1)  # a matrix product on a GPU may use fewer bits
