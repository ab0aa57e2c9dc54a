"""Reward terms for velocity tracking: functions of a control step, per second.

The terms and most weights are standard for velocity policies of quadrupeds (Rudin et al. 2021; MuJoCo Playground, Zakka
et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, constant, namespace
from robopolicy_tasks.velocity.motion import BaseMotion

TOLERANCE = 0.25  # [m^2/s^2, rad^2/s^2] width of the tracking rewards
SWING = 0.09  # [m] target height of the centre of a foot in mid-swing
MAX_SWING = 0.4  # [s] maximum rewarded swing
MIN_SWING = 0.12  # [s] shorter swings are penalised
_HIPS: Array = np.tile([1.0, 0.1, 0.1], 4)


@dataclass(frozen=True)
class ControlStep:
    """Inputs of the reward terms for N environments."""

    motion: BaseMotion  # after the step
    command: Array  # (N, 3) target velocity along x and y [m/s] and turning rate [rad/s], in the frame of the robot
    action: Array  # (N, 12)
    last_action: Array  # (N, 12) of the previous step
    torque: Array  # (N, 12) [N m] of the motors
    air_time: Array  # (N, 4) [s] time of each foot off the ground at the start of the step
    offset: Array  # (N, 12) [rad] joints from their home

    @property
    def xp(self) -> Any:
        """Library of the arrays: numpy or torch."""
        return namespace(self.action)

    @property
    def moving(self) -> NDArray[np.bool_]:
        """Mask `(N,)` of commands with motion."""
        return self.xp.linalg.norm(self.command, axis=1) > 0.1


def track_lin_vel(step: ControlStep) -> Array:
    """Score of the velocity along the ground, 1 at the command."""
    return step.xp.exp(-step.xp.square(step.command[:, :2] - step.motion.velocity[:, :2]).sum(1) / TOLERANCE)


def track_ang_vel(step: ControlStep) -> Array:
    """Score of the turning rate, 1 at the command."""
    return step.xp.exp(-step.xp.square(step.command[:, 2] - step.motion.turning[:, 2]) / TOLERANCE)


def lin_vel_z_l2(step: ControlStep) -> Array:
    """Squared vertical velocity."""
    return step.xp.square(step.motion.velocity[:, 2])


def ang_vel_xy_l2(step: ControlStep) -> Array:
    """Squared turning rate about the horizontal axes."""
    return step.xp.square(step.motion.turning[:, :2]).sum(1)


def flat_orientation_l2(step: ControlStep) -> Array:
    """Squared horizontal part of gravity."""
    return step.xp.square(step.motion.gravity[:, :2]).sum(1)


def torque(step: ControlStep) -> Array:
    """Squared torques."""
    return step.xp.square(step.torque).sum(1)


def power(step: ControlStep) -> Array:
    """Absolute mechanical power [W]."""
    return step.xp.abs(step.torque * step.motion.speeds).sum(1)


def action_rate(step: ControlStep) -> Array:
    """Squared change of the action."""
    return step.xp.square(step.action - step.last_action).sum(1)


def joint_deviation_l2(step: ControlStep) -> Array:
    """Squared offset of the joints from home, with ten times the weight for the hips."""
    return (step.xp.square(step.offset) * constant(_HIPS, step.offset)).sum(1)


def stand_still(step: ControlStep) -> Array:
    """Offset of the joints during commands without motion."""
    return step.xp.abs(step.offset).sum(1) * ~step.moving


def feet_air_time(step: ControlStep) -> Array:
    """Swing time above the minimum of landing feet, for commands with motion."""
    landed = step.motion.contact & (step.air_time > 0)
    length = step.xp.clip(step.air_time, None, MAX_SWING) - MIN_SWING
    return (length * landed).sum(1) * step.moving


def feet_slip(step: ControlStep) -> Array:
    """Squared speed of feet on the ground."""
    return (step.xp.square(step.motion.foot_speed) * step.motion.contact).sum(1)


def foot_clearance(step: ControlStep) -> Array:
    """Distance of moving feet from the target height."""
    return (step.xp.abs(step.motion.foot_height - SWING) * step.motion.foot_speed).sum(1)


TRACKING: dict[Callable[[ControlStep], Array], float] = {track_lin_vel: 1.0, track_ang_vel: 0.5}
STYLE: dict[Callable[[ControlStep], Array], float] = {
    lin_vel_z_l2: -1.0,
    ang_vel_xy_l2: -0.05,
    flat_orientation_l2: -2.5,
    torque: -2e-4,
    power: -1e-3,
    action_rate: -0.01,
    joint_deviation_l2: -0.5,
    stand_still: -0.3,
    feet_air_time: 5.0,
    feet_slip: -0.1,
    foot_clearance: -0.5,
}
"""Weights per second."""
TERMINATION_PENALTY = -1.0  # once


def total(terms: dict[Callable[[ControlStep], Array], float], step: ControlStep) -> Array:
    """Weighted sum of `terms` `(N,)`."""
    values = namespace(step.action).stack([term(step) for term in terms])  # (terms, N)
    return (constant(np.array([*terms.values()]), values)[:, None] * values).sum(0)
