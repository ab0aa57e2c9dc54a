"""Flight of the scripted juggler: ballistics of the ball, references, and a geometric controller (Lee et al. 2010).

Arrays have any leading dimensions `...`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import perm
from typing import NamedTuple, cast

import numpy as np

from robopolicy.contrib.drone_volleyball.scene import BALL_BOUNCE, BALL_KEPT, GRAVITY, UP, Airframe
from robopolicy.sim.backends.mujoco.task import Array

# Factor `k (k - 1) ... (k - order + 1)` of the power k in the derivatives of order 0 to 3.
_FACTORS: Array = np.array([[float(perm(k, order)) for k in range(6)] for order in range(4)])
# Maps value and two derivatives at 0 and at 1 to the coefficients of a polynomial.
_JOIN = cast(Array, np.linalg.inv(np.concatenate([(_FACTORS * np.eye(4, 6))[:3], _FACTORS[:3]])))


@dataclass(frozen=True)
class Gains:
    """Gains of the flight controller; all positive."""

    position: float = 8.0  # [1/s^2] acceleration per metre of position error
    velocity: float = 5.0  # [1/s] acceleration per metre per second of velocity error
    attitude: float = 100.0  # [1/s^2] angular acceleration per unit of attitude error
    turning: float = 18.0  # [1/s] angular acceleration per radian per second
    heading: float = 1.0  # [1/s] the same about the vertical axis, where rotors are weak
    reach: float = 6.0  # [m/s^2] maximum acceleration for the correction of errors


class Reference(NamedTuple):
    """Target motion of a drone."""

    position: Array  # (..., 3) [m]
    velocity: Array  # (..., 3) [m/s]
    acceleration: Array  # (..., 3) [m/s^2]
    jerk: Array  # (..., 3) [m/s^3]
    grip: Array = np.ones(1)  # (..., 1) fraction of the errors of position and velocity that tilt the drone


class DroneState(NamedTuple):
    """Motion of a drone."""

    position: Array  # (..., 3) [m]
    rotation: Array  # (..., 3, 3) body axes in the columns
    velocity: Array  # (..., 3) [m/s]
    turning: Array  # (..., 3) [rad/s] about the body axes


def at_rest(position: Array) -> Reference:
    """Reference that stays at `position` `(..., 3)`."""
    zero = np.zeros_like(position)
    return Reference(position, zero, zero, zero, np.ones_like(position[..., :1]))


def fall_time(height: Array, speed: Array, level: Array) -> Array:
    """Time [s] until a ball at `height` rising with `speed` falls through `level` `(...)`; 0 if it is below."""
    square = np.square(speed) + 2 * GRAVITY * (height - level)
    return np.where(square > 0, np.maximum(speed + np.sqrt(np.maximum(square, 0.0)), 0.0) / GRAVITY, 0.0)


def throw(start: Array, goal: Array, apex: Array) -> Array:
    """Velocity `(..., 3)` [m/s] of a ball that flies from `start` to `goal` `(..., 3)` through the height `apex`."""
    up = np.sqrt(2 * GRAVITY * np.maximum(apex - start[..., 2], 0.05))
    time = fall_time(start[..., 2], up, goal[..., 2])
    flat = (goal[..., :2] - start[..., :2]) / time[..., None]
    return np.concatenate([flat, up[..., None]], -1)


def bounce(coming: Array, normal: Array, speed: Array) -> Array:
    """Velocity `(..., 3)` of a ball without spin after a paddle that moves with `speed` `(...)` along its `normal`."""
    along = (coming * normal).sum(-1, keepdims=True)
    return BALL_KEPT * (coming - along * normal) + ((1 + BALL_BOUNCE) * speed[..., None] - BALL_BOUNCE * along) * normal


def paddle_for(coming: Array, leaving: Array) -> tuple[Array, Array]:
    """Normal `(..., 3)` and speed `(...)` [m/s] of the paddle that turns `coming` into `leaving`; inverts `bounce`.

    A bounce keeps `kept * coming` of the motion along the paddle, so `leaving - kept * coming` is normal to it.
    """
    normal = leaving - BALL_KEPT * coming
    normal = normal / np.linalg.norm(normal, axis=-1, keepdims=True)
    speed = ((leaving + BALL_BOUNCE * coming) * normal).sum(-1) / (1 + BALL_BOUNCE)
    return normal, speed


def smooth(start: Reference, end: Reference, time: Array) -> Array:
    """Coefficients `(..., 3, 6)` of polynomials of `t / time` that connect `start` and `end` in `time` `(...)` [s].

    They match position, velocity and acceleration at both ends.
    """
    scale = time[..., None]
    ends = [part * scale**order for side in (start, end) for order, part in enumerate(side[:3])]
    return np.stack(ends, -1) @ _JOIN.T


def along(coefficients: Array, time: Array, now: Array) -> Reference:
    """Reference of `smooth` at the time `now` of `time` `(...)` [s]."""
    powers = (now / time)[..., None, None] ** np.arange(6)  # (..., 1, 6)
    parts = []
    for order in range(4):
        slope = np.concatenate([np.zeros_like(powers[..., :order]), powers[..., : 6 - order]], -1) * _FACTORS[order]
        parts.append((coefficients * slope).sum(-1) / time[..., None] ** order)
    return Reference(*parts)


def rotor_thrusts(frame: Airframe, gains: Gains, pose: DroneState, reference: Reference) -> Array:
    """Thrusts `(..., 4)` [N], within the rotors' limits, that track the reference and keep the heading."""
    error = gains.position * (reference.position - pose.position)
    error = error + gains.velocity * (reference.velocity - pose.velocity)
    size = np.linalg.norm(error, axis=-1, keepdims=True)
    error = error * np.minimum(1.0, gains.reach / np.maximum(size, 1e-9))
    error = error * np.concatenate(np.broadcast_arrays(reference.grip, reference.grip, 1.0), -1)
    force = reference.acceleration + error + GRAVITY * UP
    strength = np.maximum(np.linalg.norm(force, axis=-1, keepdims=True), 1e-6)
    target = _attitude(force / strength, pose.rotation)
    swing = np.cross(force / strength, reference.jerk / strength)  # (..., 3) [rad/s] of the target normal, in the world
    turning = (pose.rotation.swapaxes(-1, -2) @ swing[..., None])[..., 0]
    gap = target.swapaxes(-1, -2) @ pose.rotation
    gap = 0.5 * (gap - gap.swapaxes(-1, -2))
    off: Array = np.stack([gap[..., 2, 1], gap[..., 0, 2], gap[..., 1, 0]], -1)
    damping = np.array([gains.turning, gains.turning, gains.heading])
    angular: Array = -gains.attitude * off - damping * (pose.turning - turning)
    torque = frame.inertia * angular + np.cross(pose.turning, frame.inertia * pose.turning)
    total = frame.mass * (force * pose.rotation[..., :, 2]).sum(-1)
    return _within(frame, np.clip(total, 0.0, 4 * frame.max_thrust), torque)


def _attitude(normal: Array, rotation: Array) -> Array:
    """Attitude `(..., 3, 3)` with the given normal and the heading of `rotation`."""
    left = np.cross(normal, rotation[..., :, 0])
    left = left / np.maximum(np.linalg.norm(left, axis=-1, keepdims=True), 1e-6)
    return cast(Array, np.stack([np.cross(left, normal), left, normal], -1))


def _within(frame: Airframe, total: Array, torque: Array) -> Array:
    """Thrusts within the limits: reduce rotation about the vertical first, then the total, to keep tilting."""
    tilt = frame.thrusts(np.zeros_like(total), torque * [1.0, 1.0, 0.0])
    spin = frame.thrusts(np.zeros_like(total), torque * [0.0, 0.0, 1.0])
    lift = frame.thrusts(total, np.zeros_like(torque))
    room = np.minimum(frame.max_thrust - lift - tilt, lift + tilt).min(-1, keepdims=True)
    share = np.clip(room / np.maximum(np.abs(spin).max(-1, keepdims=True), 1e-9), 0.0, 1.0)
    thrusts = lift + tilt + share * spin
    thrusts = thrusts - np.maximum(thrusts.max(-1, keepdims=True) - frame.max_thrust, 0.0)
    thrusts = thrusts - np.minimum(thrusts.min(-1, keepdims=True), 0.0)
    return cast(Array, np.clip(thrusts, 0.0, frame.max_thrust))
