"""Safety filter of robot commands: the output is finite and within all limits for any input.

A command is sent only if the fastest stop from it (`braking_path`) stays within the limits of position, velocity,
acceleration and jerk. The first period of that stop is then a safe command in the next period, which replaces an unsafe
one; by induction, the limits always hold after a start at rest. Commands that can be stopped in time are unchanged.

Stops of at most `EXACT_PERIODS` are computed period by period, longer ones are bounded in closed form (`stop_bounds`),
so that the work of a tick is bounded; a bounded stop counts two periods of motion more than an exact one.

Order of the checks: measurement, shape, finite numbers, mode (absolute, delta, velocity), position with margin, lead
over the measured position, velocity, step, acceleration, jerk, braking distance, effort, workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.safety.interventions import SafetyIntervention, unit_of
from robopolicy.deploy.safety.motion import (
    Array,
    Bounds,
    JointLimits,
    JointMotion,
    braking_path,
    stop_bounds,
    stopping_acceleration,
)
from robopolicy.errors import UserError

Mode = Literal["absolute", "delta", "velocity"]
Mask = NDArray[np.bool_]

SLACK = 1.0 + 1e-9  # tolerance of rounding for motions exactly at a limit
ROUNDING = 1e-12  # [rad or m] distance kept from the limits against rounding of sums
EXACT_PERIODS = 16  # longest stops that are computed period by period
BLEND_FRACTIONS = np.linspace(0.0, 1.0, 33)[:, None]  # fractions of the command between stop and command
COARSE_FRACTIONS = BLEND_FRACTIONS[::2]  # where stops are bounded in closed form
MAX_NUMBER = 1e100  # larger numbers are clipped, so that squares and products do not overflow
MAX_PERIODS = 1e6  # periods at full speed; farther targets are clipped to prevent overflow


class JointMeasurement(NamedTuple):
    """Last measurement of the robot, arrays `(J,)`, NaN for missing values."""

    time: float  # [s, monotonic] current time
    position: Array  # [rad or m]
    velocity: Array  # [rad/s or m/s]
    effort: Array  # [Nm or N]


class FilterState(NamedTuple):
    """State of the filter between two ticks."""

    motion: JointMotion  # motion of the commands sent
    target: Array  # (J,) last target, within position limits

    @classmethod
    def at_rest(cls, position: Array) -> FilterState:
        """State at rest at `position` `(J,)`."""
        position = np.array(position, np.float64)
        return cls(JointMotion(position, np.zeros_like(position), np.zeros_like(position)), position)


@dataclass(frozen=True)
class Workspace:
    """Box in the frame of `forward` that must contain points of the robot."""

    forward: Callable[[Array], Array]  # joint positions (N, J) -> points (N, P, 3) [m]
    low: tuple[float, float, float]  # [m]
    high: tuple[float, float, float]  # [m]

    def contains(self, path: Array, start: Array) -> bool:
        """Whether all points of `path` `(N, J)` are in the box, or no farther outside than at `start` `(J,)`."""
        now = self.forward(start[None])  # (1, P, 3)
        points = self.forward(path)  # (N, P, 3)
        low, high = np.minimum(self.low, now) - 1e-9, np.maximum(self.high, now) + 1e-9
        return bool(np.all((points >= low) & (points <= high)))


@dataclass(frozen=True)
class FilterConfig:
    """Command mode and limits of the filter."""

    mode: Mode = "absolute"  # positions, changes of the last sent command, or velocities (also as output)
    margin: float = 0.002  # fraction of a joint's range kept free at either end
    max_lead: float = 0.25  # [s] maximum distance from the measured position, as time at full speed
    max_step: float = np.inf  # [rad or m] maximum change of a command per tick

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UserError(f"The mode of the safety filter must be one of {', '.join(get_args(Mode))}.")
        if not (0.0 <= self.margin < 0.5 and self.max_lead > 0.0 and self.max_step > 0.0):
            raise UserError("The safety filter needs 0 <= margin < 0.5, max_lead > 0 and max_step > 0.")


class SafetyFilter:
    """Stateless filter of commands: equal inputs have equal outputs."""

    def __init__(
        self, limits: JointLimits, config: FilterConfig | None = None, workspace: Workspace | None = None
    ) -> None:
        self.limits, self.config, self.workspace = limits, config or FilterConfig(), workspace
        width = limits.position_high - limits.position_low
        margin = self.config.margin * np.where(np.isfinite(width), width, 0.0) + ROUNDING
        self._low, self._high = limits.position_low + margin, limits.position_high - margin
        self._cached: tuple[float, Bounds] | None = None

    def step(
        self, command: Any, state: FilterState, measured: JointMeasurement, dt: float
    ) -> tuple[Array, FilterState, tuple[SafetyIntervention, ...]]:
        """Filter a command `(J,)`.

        Args:
            command: Command in the units of the mode; any object is accepted.
            state: State returned by the previous tick.
            measured: Last measurement.
            dt: Control period [s], constant for a sequence of states.

        Returns:
            Safe command `(J,)`, next state, and interventions in the order of the checks.
        """
        bounds = self._bounds(dt)
        motion = self._anchored(state.motion, measured)
        requested = read_command(command, len(self.limits))
        if any(np.isinf(values).any() for values in measured[1:]):
            requested = "measurement"  # a missing value is NaN; an infinite one is a fault of a sensor
        if isinstance(requested, str):
            return self._send(motion, state.target, bounds, dt, [self._note(requested, measured)])
        done: list[SafetyIntervention] = []
        target = self._target(requested, motion, measured, dt, bounds, done)
        overload = np.abs(measured.effort) > self.limits.effort
        if overload.any():
            self._record(done, "effort", overload, measured.effort, self.limits.effort, measured.time)
            return self._send(motion, target, bounds, dt, done)
        wanted, limited = self._limited(target, state.target, motion, measured, bounds, dt, done)
        acceleration = self._stoppable(wanted, limited, target, motion, bounds, measured, done)
        if self.workspace is not None:
            acceleration = self._inside(self.workspace, acceleration, motion, bounds, measured, done)
        after = motion.advance(acceleration)
        exact = ~limited & (acceleration == target - motion.position - motion.velocity)
        after = after._replace(position=np.where(exact, target, after.position))
        return self._output(after, dt), FilterState(after, target), tuple(done)

    def hold(self, state: FilterState, dt: float) -> tuple[Array, FilterState]:
        """Command and next state for one period of the fastest stop, or at rest after it."""
        bounds = self._bounds(dt)
        return self._send(state.motion, state.target, bounds, dt, [])[:2]

    def _bounds(self, dt: float) -> Bounds:
        """Limits per control period, computed once for the usual period."""
        if self._cached is None or self._cached[0] != dt:
            self._cached = dt, Bounds.of(self.limits, dt, self.config.max_step)
        return self._cached[1]

    def _send(
        self, motion: JointMotion, target: Array, bounds: Bounds, dt: float, done: list[SafetyIntervention]
    ) -> tuple[Array, FilterState, tuple[SafetyIntervention, ...]]:
        after = motion.advance(stopping_acceleration(motion.velocity, motion.acceleration, bounds))
        return self._output(after, dt), FilterState(after, target), tuple(done)

    def _output(self, motion: JointMotion, dt: float) -> Array:
        return motion.velocity / dt if self.config.mode == "velocity" else motion.position.copy()

    def _anchored(self, motion: JointMotion, measured: JointMeasurement) -> JointMotion:
        """Replace the integrated position by the measured one if commands are velocities."""
        if self.config.mode != "velocity":
            return motion
        here = np.minimum(np.maximum(measured.position, -MAX_NUMBER), MAX_NUMBER)
        return motion._replace(position=np.where(np.isfinite(measured.position), here, motion.position))

    def _target(
        self,
        requested: Array,
        motion: JointMotion,
        measured: JointMeasurement,
        dt: float,
        bounds: Bounds,
        done: list[SafetyIntervention],
    ) -> Array:
        """Target position `(J,)` within the position limits and the maximum lead over the measured position."""
        here = motion.position
        if self.config.mode != "absolute":
            requested = here + (requested * dt if self.config.mode == "velocity" else requested)
        target = np.minimum(np.maximum(requested, self._low), self._high)
        self._record(done, "position", np.abs(requested - target) > 2 * ROUNDING, requested, target, measured.time)
        far = MAX_PERIODS * bounds.velocity
        target = np.minimum(np.maximum(target, here - far), here + far)
        reach = self.limits.velocity * self.config.max_lead
        near = np.fmin(np.fmax(target, measured.position - reach), measured.position + reach)  # NaN is no bound
        self._record(done, "lead", near != target, np.abs(target - measured.position), reach, measured.time)
        return np.minimum(np.maximum(near, self._low), self._high)

    def _limited(
        self,
        target: Array,
        before: Array,
        motion: JointMotion,
        measured: JointMeasurement,
        bounds: Bounds,
        dt: float,
        done: list[SafetyIntervention],
    ) -> tuple[Array, Mask]:
        """Desired acceleration `(J,)`, and mask of the joints that do not reach the target in one period."""
        step = target - motion.position
        acceleration = step - motion.velocity
        limited = np.zeros(len(self.limits), np.bool_)
        for kind, value, bound, allowed, unit in (
            ("velocity", step, self.limits.velocity * dt, self.limits.velocity, dt),
            ("step", step, bounds.velocity, bounds.velocity, 1.0),
            ("acceleration", acceleration, bounds.acceleration, bounds.acceleration / dt**2, dt**2),
            ("jerk", acceleration - motion.acceleration, bounds.jerk, bounds.jerk / dt**3, dt**3),
        ):
            beyond = (np.abs(value) > bound * SLACK) & ~limited
            if beyond.any():
                self._record(done, kind, beyond, value / unit, allowed, measured.time)
                limited |= beyond
        goal = step
        if self.config.mode != "velocity":
            goal = approach(target, before, motion, bounds)
            behind = (motion.position != before) & (goal != step) & ~limited  # a direct motion would overshoot
            if behind.any():
                self._record(done, "lag", behind, step / dt, np.abs(goal) / dt, measured.time)
                limited |= behind
        goal = np.minimum(np.maximum(goal, -bounds.velocity), bounds.velocity)
        slower = stopping_acceleration(motion.velocity - goal, motion.acceleration, bounds)
        return np.where(limited, slower, acceleration), limited

    def _stoppable(
        self,
        wanted: Array,
        limited: Mask,
        target: Array,
        motion: JointMotion,
        bounds: Bounds,
        measured: JointMeasurement,
        done: list[SafetyIntervention],
    ) -> Array:
        """Acceleration nearest to `wanted` from which every joint can stop in time; at worst a stop."""
        if self._far_from_limits(wanted, motion, bounds):
            return wanted
        stop = stopping_acceleration(motion.velocity, motion.acceleration, bounds)
        exact, low = bounds.longest_stop <= EXACT_PERIODS, np.zeros(len(self.limits))
        fractions = BLEND_FRACTIONS if exact else COARSE_FRACTIONS
        for level in range(2):
            accelerations = stop + (low + fractions) * (wanted - stop)  # (K, J)
            if level == 0:
                accelerations[-1] = wanted
            fine = self._safe(accelerations, motion, bounds)
            if level == 0:
                if fine[-1].all():
                    return wanted
                limit = np.where(motion.velocity > 0, self._high, self._low)
                self._record(done, "braking", ~fine[-1] & ~limited, target, limit, measured.time)
            fine[0] = True  # the stop itself, then the last result
            low = low + fractions[len(fine) - 1 - fine[::-1].argmax(0), 0]
            if not exact:
                break
            fractions = BLEND_FRACTIONS[1] * BLEND_FRACTIONS[:-1]
        return np.where(low == 1.0, wanted, stop + low * (wanted - stop))

    def _far_from_limits(self, acceleration: Array, motion: JointMotion, bounds: Bounds) -> bool:
        """Whether a generous bound of the stop after one period with `acceleration` `(J,)` is within all limits."""
        after = motion.advance(acceleration)
        size = np.abs(after.acceleration)
        peak = np.abs(after.velocity) + size * (0.5 * size / bounds.jerk + 1.0)
        way = peak * bounds.duration
        low, high = self._range(motion.position)
        inside = (after.position - way >= low) & (after.position + way <= high) & (peak <= bounds.velocity)
        return bool(inside.all())

    def _range(self, position: Array) -> tuple[Array, Array]:
        """Allowed positions `(J,)`, with half of the distance kept against rounding, and the present one."""
        return (
            np.minimum(self._low - 0.5 * ROUNDING, position),
            np.maximum(self._high + 0.5 * ROUNDING, position),
        )

    def _safe(self, acceleration: Array, motion: JointMotion, bounds: Bounds) -> Mask:
        """Whether a stop after one period with `acceleration` `(..., J)` stays within all limits."""
        low, high = self._range(motion.position)
        after = motion.advance(acceleration)
        if bounds.longest_stop > EXACT_PERIODS:
            reached = stop_bounds(after, bounds)
            fine = (reached.low >= low) & (reached.high <= high) & (after.position >= low) & (after.position <= high)
            return fine & (reached.speed <= bounds.velocity * SLACK)
        fine = np.ones(acceleration.shape, np.bool_)
        for point in [after, *braking_path(after, bounds)]:
            fine &= (point.position >= low) & (point.position <= high)
            fine &= np.abs(point.velocity) <= bounds.velocity * SLACK
        return fine

    def _inside(
        self,
        workspace: Workspace,
        wanted: Array,
        motion: JointMotion,
        bounds: Bounds,
        measured: JointMeasurement,
        done: list[SafetyIntervention],
    ) -> Array:
        """Acceleration `wanted`, or its largest blend with a stop from which the robot stops within the box."""

        def fits(acceleration: Array) -> bool:
            after = motion.advance(acceleration)
            path = [after, *braking_path(after, bounds)]
            return workspace.contains(np.stack([point.position for point in path]), motion.position)

        if fits(wanted):
            return wanted
        done.append(self._note("workspace", measured))
        stop = stopping_acceleration(motion.velocity, motion.acceleration, bounds)
        low, high = 0.0, 1.0
        for _ in range(6):
            middle = 0.5 * (low + high)
            acceleration = stop + middle * (wanted - stop)
            safe = fits(acceleration) and self._safe(acceleration, motion, bounds).all()
            low, high = (middle, high) if safe else (low, middle)
        return stop + low * (wanted - stop)

    def _record(
        self, done: list[SafetyIntervention], kind: str, where: Mask, value: Array, limit: Array, time: float
    ) -> None:
        joints = where.nonzero()[0].tolist()
        if joints:
            names, units, values, limits = self.limits.names, self.limits.units, value.tolist(), limit.tolist()
            done += [
                SafetyIntervention(kind, names[j], values[j], limits[j], time, unit_of(kind, units[j])) for j in joints
            ]

    def _note(self, kind: str, measured: JointMeasurement) -> SafetyIntervention:
        return SafetyIntervention(kind, "", np.nan, np.nan, measured.time)


def read_command(command: Any, joints: int) -> Array | str:
    """Convert `command` to finite numbers `(J,)`, or return the failed check: `shape` or `finite`."""
    try:
        given = np.array(command)
        if given.shape != (joints,) or given.dtype.kind not in "fiu":  # text, dates, complex numbers, objects
            return "shape"
        if np.ma.is_masked(command):  # masked entries are not numbers
            return "finite"
        requested = given
        if given.dtype != np.float64:
            with np.errstate(over="ignore"):  # longer floats become infinite
                requested = given.astype(np.float64)
    except Exception:  # not an array
        return "shape"
    return np.minimum(np.maximum(requested, -MAX_NUMBER), MAX_NUMBER) if np.isfinite(requested).all() else "finite"


def approach(target: Array, before: Array, motion: JointMotion, bounds: Bounds) -> Array:
    """Velocity `(J,)` that reaches a moving target as fast as the limits allow, with little overshoot.

    The speed relative to the target, which moved from `before` to `target`, can be braked within the remaining
    distance: w^2 / (2 B) + w B / (2 D) for a speed w, maximum acceleration B and jerk D, or w sqrt(w / D) if the stop
    ends before it reaches B, plus half a period of motion, because the acceleration acts from the next period on. The
    distance covered until the current acceleration has ended is subtracted if it increases the speed.
    """
    feed = np.minimum(np.maximum(target - before, -bounds.velocity), bounds.velocity)
    way = target - feed - motion.position
    toward = np.copysign(1.0, way)
    periods = np.abs(motion.acceleration) / bounds.jerk
    covered = toward * periods * (motion.velocity - feed + motion.acceleration * periods / 3.0)
    left = np.maximum(np.abs(way) - np.where(toward * motion.acceleration > 0, np.maximum(covered, 0.0), 0.0), 0.0)
    half = 0.5 * bounds.acceleration / bounds.jerk
    short = np.cbrt(bounds.jerk * left**2)
    speed = np.where(
        short < 2.0 * half * bounds.acceleration,
        short,
        bounds.acceleration * (np.sqrt(half**2 + 2.0 * left / bounds.acceleration) - half),
    )
    speed = speed * left / (left + 0.5 * speed + np.finfo(np.float64).tiny)
    return np.where(speed < np.abs(way), feed + toward * speed, target - motion.position)
