"""Coming to rest within limits: the brake that every command is checked against.

Everything is in units of one control period: `step` is the change of position per period, `bend` the change of step,
limited by `step_max` = v dt, `bend_max` = a dt^2 and `snap_max` = j dt^3 for the limits v, a and j of velocity,
acceleration and jerk. In these units a motion is sums and differences alone, so a plan that is followed equals the plan
that was checked, bit for bit.

The law is the time-optimal one of a double integrator with bounded input in discrete time: from bend -x the step can
come back to zero without changing sign if and only if it is at least

    T(x) = x + (x - D) + (x - 2 D) + ...   (positive terms, D = snap_max),

so the brake takes the x that has T(x) = step. Being a function of the present step and bend alone, its plan made one
period later is the rest of the plan made now.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from robopolicy.deploy.safety.limits import Array, JointLimits
from robopolicy.errors import UserError


class Bounds(NamedTuple):
    """Limits in units of one control period, arrays `(J,)` [rad or m], all finite and positive."""

    step: Array
    bend: Array
    snap: Array

    @classmethod
    def of(cls, limits: JointLimits, dt: float, step: float = np.inf) -> Bounds:
        """Those of `limits` at a control period of `dt` seconds and at most `step` per period.

        What is not limited gets the least bound that cannot matter.

        Raises:
            UserError: `dt` is not a positive number.
        """
        if not 0.0 < dt < np.inf:
            raise UserError(f"A control period must be a positive number of seconds, got {dt:g}.")
        steps = np.minimum(limits.velocity * dt, step)
        bend = np.minimum(limits.acceleration * dt**2, 2.0 * steps)
        return cls(steps, bend, np.minimum(limits.jerk * dt**3, 2.0 * bend))

    @property
    def duration(self) -> Array:
        """Control periods `(J,)` within which the brake ends from any allowed step and bend."""
        return self.step / self.bend + 5.0 * self.bend / self.snap + 8.0


class Motion(NamedTuple):
    """A motion at one instant, arrays `(..., J)` in units of one control period."""

    position: Array
    step: Array
    bend: Array

    def advance(self, bend: Array) -> Motion:
        """One period later, if the step changes by `bend`."""
        step = self.step + bend
        return Motion(self.position + step, step, bend)

    @property
    def at_rest(self) -> bool:
        """Whether nothing moves any more."""
        return not (np.any(self.step) or np.any(self.bend))


def settle(step: Array, bend: Array, bounds: Bounds) -> Array:
    """The next bend on the fastest way to step = 0 and bend = 0 `(..., J)`."""
    size = np.abs(step)
    terms = np.floor(0.5 * (np.sqrt(1.0 + 8.0 * size / bounds.snap) - 1.0))  # of T(x) behind the first
    wanted = np.minimum((size + 0.5 * bounds.snap * terms * (terms + 1.0)) / (terms + 1.0), bounds.bend)
    wanted = np.copysign(wanted, -step)
    return np.minimum(np.maximum(wanted, bend - bounds.snap), bend + bounds.snap)


def brake(motion: Motion, bounds: Bounds) -> list[Motion]:
    """The motion from the next period on until rest."""
    path = []
    periods = int(np.max(bounds.duration))
    while not motion.at_rest and len(path) < periods:
        motion = motion.advance(settle(motion.step, motion.bend, bounds))
        path.append(motion)
    return path


def safe_stop(position: Array, velocity: Array, acceleration: Array, limits: JointLimits, dt: float) -> Array:
    """Positions `(N, J)` of the fastest stop within the limits of acceleration and jerk, one per control period.

    Args:
        position: Where the joints are `(J,)` [rad or m].
        velocity: Their velocity `(J,)`, at most that of the limits.
        acceleration: Their acceleration `(J,)`, at most that of the limits.
        limits: Of the joints; position limits play no part, since a stop has no choice of path.
        dt: Control period [s].

    Returns:
        At least one row; the last is where the joints rest.
    """
    bounds = Bounds.of(limits, dt)
    path = brake(Motion(position, velocity * dt, acceleration * dt**2), bounds)
    return np.stack([motion.position for motion in path] or [position])
