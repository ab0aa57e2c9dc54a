"""Joint limits of a robot, fastest stops within them, and fallback motions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError

Array = NDArray[np.float64]
EXTRA_PERIODS = 2.0  # by which a discrete stop is longer than the continuous one; 1 has no counterexample


@dataclass(frozen=True, eq=False)
class JointLimits:
    """Limits of J joints, arrays `(J,)` in SI units: rad for revolute joints, m for prismatic joints, inf if unknown.

    Velocity limits are required, since the filter cannot guarantee anything without them. Unbounded coordinates, such
    as the pose of a base, have infinite position limits.

    Raises:
        UserError: Shapes differ, a number is not positive or NaN, or a range is empty.
    """

    names: tuple[str, ...]
    position_low: Array  # [rad or m]
    position_high: Array
    velocity: Array  # [rad/s or m/s]
    acceleration: Array  # [rad/s^2 or m/s^2]
    jerk: Array  # [rad/s^3 or m/s^3]
    effort: Array  # [Nm or N]
    units: tuple[str, ...] = field(default=(), kw_only=True)  # of positions, rad or m, for messages; empty: unknown

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            twice = [name for name in self.names if self.names.count(name) > 1]
            found = f"'{twice[0]}' twice" if twice else "none"
            raise UserError(f"Joint limits need at least one joint and each name once, got {found}.")
        object.__setattr__(self, "units", self.units or ("",) * len(self.names))
        if len(self.units) != len(self.names):
            raise UserError(f"Joint limits: 'units' needs {len(self.names)} texts, got {len(self.units)}.")
        for entry in fields(self)[1:-1]:
            value = np.array(getattr(self, entry.name), np.float64)
            if value.shape != (len(self.names),):
                raise UserError(f"Joint limits: '{entry.name}' needs {len(self.names)} numbers, got {value.shape}.")
            value.setflags(write=False)
            object.__setattr__(self, entry.name, value)
            wrong = np.isnan(value) if entry.name.startswith("position") else ~(value > 0)
            if wrong.any():
                number = "a number" if entry.name.startswith("position") else "a positive number"
                raise self._error(wrong, f"'{entry.name}' must be {number}", value)
        if not np.isfinite(self.velocity).all():
            raise self._error(~np.isfinite(self.velocity), "'velocity' must be known", self.velocity)
        empty = ~(self.position_low < self.position_high)
        if empty.any():
            raise self._error(empty, "'position_low' must be below 'position_high'", self.position_low)

    def __len__(self) -> int:
        return len(self.names)

    def inside(self, position: Array, slack: float = 0.0) -> NDArray[np.bool_]:
        """Mask of the positions `(J,)` within their range plus a tolerance `slack`; False for NaN."""
        return (position >= self.position_low - slack) & (position <= self.position_high + slack)

    def _error(self, wrong: NDArray[np.bool_], what: str, value: Array) -> UserError:
        joint = int(np.flatnonzero(wrong)[0])
        return UserError(f"Limits of joint '{self.names[joint]}': {what}, got {value[joint]:g}.")


class Bounds(NamedTuple):
    """Limits in units of one control period, arrays `(J,)` [rad or m], all finite and positive."""

    velocity: Array
    acceleration: Array
    jerk: Array
    duration: Array  # upper bound of the duration of a stop from any allowed motion, in control periods
    longest_stop: float  # largest `duration`

    @classmethod
    def of(cls, limits: JointLimits, dt: float, step: float = np.inf) -> Bounds:
        """Convert `limits` for a control period of `dt` seconds and at most `step` of motion per period.

        An infinite limit becomes the smallest bound without effect.

        Raises:
            UserError: `dt` is not a positive number.
        """
        if not 0.0 < dt < np.inf:
            raise UserError(f"A control period must be a positive number of seconds, got {dt:g}.")
        steps = np.minimum(limits.velocity * dt, step)
        acceleration = np.minimum(limits.acceleration * dt**2, 2.0 * steps)
        jerk = np.minimum(limits.jerk * dt**3, 2.0 * acceleration)
        duration = steps / acceleration + 5.0 * acceleration / jerk + 8.0
        return cls(steps, acceleration, jerk, duration, float(duration.max()))


class JointMotion(NamedTuple):
    """Motion at one time, arrays `(..., J)` in units of one control period."""

    position: Array
    velocity: Array
    acceleration: Array

    def advance(self, acceleration: Array) -> JointMotion:
        """Motion after one period in which the velocity changes by `acceleration`."""
        step = self.velocity + acceleration
        return JointMotion(self.position + step, step, acceleration)

    @property
    def at_rest(self) -> bool:
        """Whether all velocities and accelerations are zero."""
        return not (np.any(self.velocity) or np.any(self.acceleration))


def stopping_acceleration(step: Array, acceleration: Array, bounds: Bounds) -> Array:
    """Next acceleration `(..., J)` of the fastest stop to zero velocity and acceleration."""
    size = np.abs(step)
    terms = np.floor(0.5 * (np.sqrt(1.0 + 8.0 * size / bounds.jerk) - 1.0))  # terms of T(x) after the first
    wanted = np.minimum((size + 0.5 * bounds.jerk * terms * (terms + 1.0)) / (terms + 1.0), bounds.acceleration)
    wanted = np.copysign(wanted, -step)
    return np.minimum(np.maximum(wanted, acceleration - bounds.jerk), acceleration + bounds.jerk)


def braking_path(motion: JointMotion, bounds: Bounds) -> list[JointMotion]:
    """Motions of the fastest stop, from the next period until rest."""
    path = []
    periods = int(bounds.longest_stop)
    while not motion.at_rest and len(path) < periods:
        motion = motion.advance(stopping_acceleration(motion.velocity, motion.acceleration, bounds))
        path.append(motion)
    return path


class StopBounds(NamedTuple):
    """Bounds of the motion during the fastest stop, arrays `(..., J)`."""

    low: Array  # lowest position
    high: Array  # highest position
    speed: Array  # largest absolute velocity


def stop_bounds(motion: JointMotion, bounds: Bounds) -> StopBounds:
    """Bounds of all motions of `braking_path`, in constant time.

    They are the extremes of the continuous fastest stop, which has one phase of falling acceleration, one of rising,
    one of constant and one of falling deceleration, plus the motion of `EXTRA_PERIODS`, by which the discrete stop is
    longer at most. A stop that reverses the direction moves back with the velocity that the deceleration has built up.
    """
    sign = np.copysign(1.0, motion.velocity)
    speed, rise = np.abs(motion.velocity), sign * motion.acceleration
    fall = np.maximum(-rise, 0.0)  # deceleration
    # The acceleration falls to zero: a sum over whole periods.
    count = np.floor(np.maximum(rise, 0.0) / bounds.jerk)
    ahead = count * (speed + (count + 1.0) * (0.5 * rise - bounds.jerk * (count + 2.0) / 6.0))
    peak = speed + count * (rise - 0.5 * bounds.jerk * (count + 1.0))
    ahead += _stopping_way(peak, np.minimum(fall, np.sqrt(2.0 * bounds.jerk * peak)), bounds) + EXTRA_PERIODS * peak
    # The deceleration falls to zero too late, and reverses the motion.
    falling = fall / bounds.jerk + 1.0  # duration
    back = behind = np.maximum(0.5 * fall * falling - speed, 0.0)
    if back.any():
        behind = back * (falling + EXTRA_PERIODS) + _stopping_way(back, np.zeros_like(back), bounds)
    forward = sign > 0
    low = motion.position - np.where(forward, behind, ahead)
    return StopBounds(low, motion.position + np.where(forward, ahead, behind), np.maximum(peak, back))


def _stopping_way(speed: Array, fall: Array, bounds: Bounds) -> Array:
    """Distance of the continuous fastest stop from `speed` with the deceleration `fall`, which does not reverse it."""
    peak = np.maximum(np.minimum(np.sqrt(bounds.jerk * speed + 0.5 * fall * fall), bounds.acceleration), fall)
    rising = (peak - fall) / bounds.jerk  # duration
    way = rising * (speed - rising * (0.5 * fall + bounds.jerk * rising / 6.0))
    reached = speed - rising * (fall + 0.5 * bounds.jerk * rising)
    constant = np.maximum(reached - 0.5 * peak * peak / bounds.jerk, 0.0) / np.maximum(peak, np.finfo(np.float64).tiny)
    return way + constant * (reached - 0.5 * constant * peak) + peak**3 / (6.0 * bounds.jerk**2)


def safe_stop(position: Array, velocity: Array, acceleration: Array, limits: JointLimits, dt: float) -> Array:
    """Positions `(N, J)` of the fastest stop within the limits of acceleration and jerk, one per control period.

    Args:
        position: Current positions `(J,)` [rad or m].
        velocity: Current velocities `(J,)`, within the limits.
        acceleration: Current accelerations `(J,)`, within the limits.
        limits: Limits of the joints; position limits do not affect the path.
        dt: Control period [s].

    Returns:
        At least one row; the last row is at rest.
    """
    bounds = Bounds.of(limits, dt)
    path = braking_path(JointMotion(position, velocity * dt, acceleration * dt**2), bounds)
    return np.stack([motion.position for motion in path] or [position])


Fallback = Callable[[Array, float], Array | None]
"""(commanded position (J,), control period [s]) -> next target (J,), or None to stay at rest."""


def hold(position: Array, dt: float) -> Array | None:
    """Stay at rest."""
    return None


def go_home(limits: JointLimits, home: Array, speed: float = 0.1) -> Fallback:
    """Create a fallback motion to `home` `(J,)` in equal time, at a fraction `speed` of the velocity limits.

    Raises:
        UserError: `home` is outside of the limits, or `speed` is not in (0, 1].
    """
    home = np.array(home, np.float64)
    if home.shape != (len(limits),) or not limits.inside(home).all():
        raise UserError("The home position of the fall-back must lie within the joint limits.")
    if not 0.0 < speed <= 1.0:
        raise UserError(f"The speed of the fall-back must lie in (0, 1], got {speed:g}.")

    def target(position: Array, dt: float) -> Array | None:
        way = home - position
        periods = np.max(np.abs(way) / (speed * limits.velocity * dt))
        return None if periods == 0.0 else position + way / max(periods, 1.0)

    return target
