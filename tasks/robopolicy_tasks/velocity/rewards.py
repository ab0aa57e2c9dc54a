"""Terms of the reward for following velocity commands: plain functions of a control step, per second of time.

The terms and most weights are those that velocity policies for quadrupeds are usually trained with (Rudin et al.,
Learning to Walk in Minutes, 2021; MuJoCo Playground, Zakka et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array
from robopolicy_tasks.velocity.motion import Motion

TOLERANCE = 0.25  # [m^2/s^2, rad^2/s^2] width of the tracking rewards
SWING = 0.09  # [m] wanted height of a foot's centre in the middle of a swing
LONGEST_SWING = 0.4  # [s] beyond which a step earns no more
SHORTEST_SWING = 0.12  # [s] below which a step costs


@dataclass(frozen=True)
class ControlStep:
    """What the terms see of N environments."""

    motion: Motion  # after the step
    command: Array  # (N, 3) wanted velocity along x and y [m/s] and turning rate [rad/s], in the robot's frame
    action: Array  # (N, 12)
    last_action: Array  # (N, 12) of the step before
    torque: Array  # (N, 12) [N m] of the motors
    air_time: Array  # (N, 4) [s] each foot has been off the ground when the step began, 0 on the ground
    offset: Array  # (N, 12) [rad] joints from their home

    @property
    def moving(self) -> NDArray[np.bool_]:
        """(N,) commands other than to stand."""
        return np.linalg.norm(self.command, axis=1) > 0.1


def track_velocity(step: ControlStep) -> Array:
    """1 at the commanded velocity along the ground."""
    return np.exp(-np.square(step.command[:, :2] - step.motion.velocity[:, :2]).sum(1) / TOLERANCE)


def track_turning(step: ControlStep) -> Array:
    """1 at the commanded turning rate."""
    return np.exp(-np.square(step.command[:, 2] - step.motion.turning[:, 2]) / TOLERANCE)


def bounce(step: ControlStep) -> Array:
    """Squared vertical velocity."""
    return np.square(step.motion.velocity[:, 2])


def roll_and_pitch_rate(step: ControlStep) -> Array:
    """Squared turning rate about the horizontal axes."""
    return np.square(step.motion.turning[:, :2]).sum(1)


def tilt(step: ControlStep) -> Array:
    """Squared horizontal part of gravity."""
    return np.square(step.motion.gravity[:, :2]).sum(1)


def torque(step: ControlStep) -> Array:
    """Squared torques."""
    return np.square(step.torque).sum(1)


def power(step: ControlStep) -> Array:
    """Mechanical power, whichever way it flows [W]."""
    return np.abs(step.torque * step.motion.speeds).sum(1)


def action_rate(step: ControlStep) -> Array:
    """Squared change of the action."""
    return np.square(step.action - step.last_action).sum(1)


def posture(step: ControlStep) -> Array:
    """Squared offset of the joints from home, the hips' ten times as much as the others'."""
    return (np.square(step.offset) * np.tile([1.0, 0.1, 0.1], 4)).sum(1)


def restlessness(step: ControlStep) -> Array:
    """Offset of the joints while the command is to stand."""
    return np.abs(step.offset).sum(1) * ~step.moving


def stride(step: ControlStep) -> Array:
    """How much longer than the shortest swing the steps were that end now, while the command is to move."""
    landed = step.motion.contact & (step.air_time > 0)
    length = np.minimum(step.air_time, LONGEST_SWING) - SHORTEST_SWING
    return (length * landed).sum(1) * step.moving


def slip(step: ControlStep) -> Array:
    """Squared speed of feet on the ground."""
    return (np.square(step.motion.foot_speed) * step.motion.contact).sum(1)


def clearance(step: ControlStep) -> Array:
    """How far moving feet are from the wanted height."""
    return (np.abs(step.motion.foot_height - SWING) * step.motion.foot_speed).sum(1)


TRACKING: dict[Callable[[ControlStep], Array], float] = {track_velocity: 1.0, track_turning: 0.5}
STYLE: dict[Callable[[ControlStep], Array], float] = {
    bounce: -1.0,
    roll_and_pitch_rate: -0.05,
    tilt: -2.5,
    torque: -2e-4,
    power: -1e-3,
    action_rate: -0.01,
    posture: -0.5,
    restlessness: -0.3,
    stride: 5.0,
    slip: -0.1,
    clearance: -0.5,
}
"""Weights per second."""
FALL = -1.0  # once


def total(terms: dict[Callable[[ControlStep], Array], float], step: ControlStep) -> Array:
    """Weighted sum of `terms` `(N,)`."""
    return np.sum([weight * term(step) for term, weight in terms.items()], axis=0)
