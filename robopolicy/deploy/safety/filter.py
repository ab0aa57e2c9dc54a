"""The last thing a command passes before a robot: whatever comes in, what goes out is finite and within all limits.

A command is sent only if the fastest stop from it (`stop.brake`) stays within the limits of position, velocity,
acceleration and jerk, all at once. The first period of that stop is therefore always a safe command one period later,
which is what is sent instead of anything worse; by induction the limits hold for ever, from any start at rest.
Whatever can be stopped in time passes unchanged.

Order of the checks: shape, finite numbers, mode (absolute, delta, velocity), position with margin, lead over the
measured position, velocity, step, acceleration, jerk, braking distance, effort, workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.safety.interventions import Intervention
from robopolicy.deploy.safety.motion import Array, Bounds, JointLimits, Motion, brake, settle
from robopolicy.errors import UserError

Mode = Literal["absolute", "delta", "velocity"]
Mask = NDArray[np.bool_]

SLACK = 1.0 + 1e-9  # so that a motion at exactly a limit is not one beyond it by rounding
ROUNDING = 1e-12  # [rad or m] kept from the limits, since sums of steps are not exact to the last bit
SHARES = np.linspace(0.0, 1.0, 33)[:, None]  # of a wish in a compromise with the brake
HUGE = 1e100  # numbers beyond are as good as this one, whose square and product with a time do not overflow
FAR = 1e6  # periods at full speed; targets beyond are as good as there, and do not overflow


class Measured(NamedTuple):
    """What the robot said last, arrays `(J,)`, NaN where it did not."""

    time: float  # [s] now, on the monotonic clock
    position: Array  # [rad or m]
    velocity: Array  # [rad/s or m/s]
    effort: Array  # [Nm or N]


class FilterState(NamedTuple):
    """What the filter remembers from one tick to the next."""

    motion: Motion  # of the commands sent
    target: Array  # (J,) what was last asked for, within position limits

    @classmethod
    def at_rest(cls, position: Array) -> FilterState:
        """Standing still at `position` `(J,)`."""
        position = np.array(position, np.float64)
        return cls(Motion(position, np.zeros_like(position), np.zeros_like(position)), position)


@dataclass(frozen=True)
class Workspace:
    """A box that points of the robot have to stay in, in the frame of `forward`."""

    forward: Callable[[Array], Array]  # joint positions (N, J) -> points (N, P, 3) [m]
    low: tuple[float, float, float]  # [m]
    high: tuple[float, float, float]  # [m]

    def contains(self, path: Array, start: Array) -> bool:
        """Whether every point of `path` `(N, J)` lies in the box, or no further out than it does at `start` `(J,)`."""
        now = self.forward(start[None])  # (1, P, 3)
        points = self.forward(path)  # (N, P, 3)
        low, high = np.minimum(self.low, now) - 1e-9, np.maximum(self.high, now) + 1e-9
        return bool(np.all((points >= low) & (points <= high)))


@dataclass(frozen=True)
class FilterConfig:
    """How commands are read and how far they may go."""

    mode: Mode = "absolute"  # positions, changes of the last command sent, or velocities; velocities come out as such
    margin: float = 0.002  # of a joint's range, kept free at either end
    lead: float = 0.25  # [s] of motion at full speed that a command may be ahead of the measured position
    step: float = np.inf  # [rad or m] largest change of a command per tick

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UserError(f"The mode of the safety filter must be one of {', '.join(get_args(Mode))}.")
        if not (0.0 <= self.margin < 0.5 and self.lead > 0.0 and self.step > 0.0):
            raise UserError("The safety filter needs 0 <= margin < 0.5, lead > 0 and step > 0.")


class SafetyFilter:
    """Bounds commands; holds no state of its own, so the same inputs always give the same output."""

    def __init__(
        self, limits: JointLimits, config: FilterConfig | None = None, workspace: Workspace | None = None
    ) -> None:
        self.limits, self.config, self.workspace = limits, config or FilterConfig(), workspace
        width = limits.position_high - limits.position_low
        margin = self.config.margin * np.where(np.isfinite(width), width, 0.0) + ROUNDING
        self._low, self._high = limits.position_low + margin, limits.position_high - margin

    def step(
        self, command: Any, state: FilterState, measured: Measured, dt: float
    ) -> tuple[Array, FilterState, tuple[Intervention, ...]]:
        """The command to send instead of `command` `(J,)`.

        Args:
            command: What the policy wants, in the units of the mode; anything at all is survived.
            state: What this returned in the tick before.
            measured: What the robot said last.
            dt: Control period [s], the same in every call on one state.

        Returns:
            Safe command `(J,)`, the next state, and what was done about `command`, in the order of the checks.
        """
        bounds = Bounds.of(self.limits, dt, self.config.step)
        motion = self._anchored(state.motion, measured)
        wish = read_command(command, len(self.limits))
        if isinstance(wish, str):
            return self._send(motion, state.target, bounds, dt, [self._note(wish, measured)])
        done: list[Intervention] = []
        target = self._target(wish, motion, measured, dt, bounds, done)
        overload = np.abs(measured.effort) > self.limits.effort
        if overload.any():
            self._record(done, "effort", overload, measured.effort, self.limits.effort, measured.time)
            return self._send(motion, target, bounds, dt, done)
        wanted, limited = self._limited(target, state.target, motion, measured, bounds, dt, done)
        bend = self._stoppable(wanted, limited, target, motion, bounds, measured, done)
        if self.workspace is not None:
            bend = self._inside(self.workspace, bend, motion, bounds, measured, done)
        after = motion.advance(bend)
        exact = ~limited & (bend == target - motion.position - motion.step)
        after = after._replace(position=np.where(exact, target, after.position))
        return self._output(after, dt), FilterState(after, target), tuple(done)

    def hold(self, state: FilterState, dt: float) -> tuple[Array, FilterState]:
        """One period of the fastest stop, and of standing still after it: the command to send and the next state."""
        command, after, _ = self._send(state.motion, state.target, Bounds.of(self.limits, dt, self.config.step), dt, [])
        return command, after

    def _send(
        self, motion: Motion, target: Array, bounds: Bounds, dt: float, done: list[Intervention]
    ) -> tuple[Array, FilterState, tuple[Intervention, ...]]:
        after = motion.advance(settle(motion.step, motion.bend, bounds))
        return self._output(after, dt), FilterState(after, target), tuple(done)

    def _output(self, motion: Motion, dt: float) -> Array:
        return motion.step / dt if self.config.mode == "velocity" else motion.position.copy()

    def _anchored(self, motion: Motion, measured: Measured) -> Motion:
        """A robot that is driven by velocities is where it says, not where the velocities sent should have put it."""
        if self.config.mode != "velocity":
            return motion
        here = np.clip(measured.position, -HUGE, HUGE)
        return motion._replace(position=np.where(np.isfinite(measured.position), here, motion.position))

    def _target(
        self, wish: Array, motion: Motion, measured: Measured, dt: float, bounds: Bounds, done: list[Intervention]
    ) -> Array:
        """The position `(J,)` that is asked for, within the position limits and the lead over the measured one."""
        here = motion.position
        if self.config.mode != "absolute":
            wish = here + (wish * dt if self.config.mode == "velocity" else wish)
        target = np.clip(wish, self._low, self._high)
        self._record(done, "position", np.abs(wish - target) > 2 * ROUNDING, wish, target, measured.time)
        target = np.clip(target, here - FAR * bounds.step, here + FAR * bounds.step)
        reach = self.limits.velocity * self.config.lead
        near = np.fmin(np.fmax(target, measured.position - reach), measured.position + reach)  # NaN bounds nothing
        self._record(done, "lead", near != target, np.abs(target - measured.position), reach, measured.time)
        return np.clip(near, self._low, self._high)

    def _limited(
        self,
        target: Array,
        before: Array,
        motion: Motion,
        measured: Measured,
        bounds: Bounds,
        dt: float,
        done: list[Intervention],
    ) -> tuple[Array, Mask]:
        """The change of step `(J,)` that is wished for, and which joints do not get to the target in one period."""
        step = target - motion.position
        bend = step - motion.step
        limited = np.zeros(len(self.limits), np.bool_)
        for kind, value, bound, allowed, unit in (
            ("velocity", step, self.limits.velocity * dt, self.limits.velocity, dt),
            ("step", step, bounds.step, bounds.step, 1.0),
            ("acceleration", bend, bounds.bend, bounds.bend / dt**2, dt**2),
            ("jerk", bend - motion.bend, bounds.snap, bounds.snap / dt**3, dt**3),
        ):
            beyond = (np.abs(value) > bound * SLACK) & ~limited
            self._record(done, kind, beyond, value / unit, allowed, measured.time)
            limited |= beyond
        goal = step
        if self.config.mode != "velocity":
            goal = approach(target, before, motion, bounds)
            behind = (motion.position != before) & (goal != step) & ~limited  # arriving now would overshoot
            self._record(done, "lag", behind, step / dt, np.abs(goal) / dt, measured.time)
            limited |= behind
        goal = np.clip(goal, -bounds.step, bounds.step)
        return np.where(limited, settle(motion.step - goal, motion.bend, bounds), bend), limited

    def _stoppable(
        self,
        wanted: Array,
        limited: Mask,
        target: Array,
        motion: Motion,
        bounds: Bounds,
        measured: Measured,
        done: list[Intervention],
    ) -> Array:
        """The bend nearest to the wanted one from which every joint can still stop in time; at worst that of a stop."""
        safe = self._safe(wanted, motion, bounds)
        if safe.all():
            return wanted
        self._record(
            done, "braking", ~safe & ~limited, target, np.where(motion.step > 0, self._high, self._low), measured.time
        )
        stop = settle(motion.step, motion.bend, bounds)
        low, width = np.zeros(len(self.limits)), 1.0
        for _ in range(2):
            bends = stop + np.minimum(low + width * SHARES, 1.0) * (wanted - stop)  # (K, J)
            fine = self._safe(bends, motion, bounds)
            fine[0] = True  # the stop itself at first, then what was just found
            low = low + width * SHARES[len(fine) - 1 - np.argmax(fine[::-1], axis=0), 0]
            width *= SHARES[1, 0]
        return np.where(safe, wanted, stop + np.minimum(low, 1.0) * (wanted - stop))

    def _safe(self, bend: Array, motion: Motion, bounds: Bounds) -> Mask:
        """Whether a stop from one period with `bend` `(..., J)` stays within all limits."""
        low, high = np.minimum(self._low, motion.position), np.maximum(self._high, motion.position)
        after = motion.advance(bend)
        peak = np.abs(after.step) + np.abs(after.bend) * (0.5 * np.abs(after.bend) / bounds.snap + 1.0)
        way = peak * bounds.duration
        if np.all((after.position - way >= low) & (after.position + way <= high) & (peak <= bounds.step)):
            return np.ones(bend.shape, np.bool_)  # far from everything, as mostly
        fine = np.ones(bend.shape, np.bool_)
        for point in [after, *brake(after, bounds)]:
            fine &= (point.position >= low) & (point.position <= high) & (np.abs(point.step) <= bounds.step * SLACK)
        return fine

    def _inside(
        self,
        workspace: Workspace,
        wanted: Array,
        motion: Motion,
        bounds: Bounds,
        measured: Measured,
        done: list[Intervention],
    ) -> Array:
        """The wanted bend, or the largest part of it beside a stop from which the robot stops within the box."""

        def fits(bend: Array) -> bool:
            after = motion.advance(bend)
            path = [after, *brake(after, bounds)]
            return workspace.contains(np.stack([point.position for point in path]), motion.position)

        if fits(wanted):
            return wanted
        done.append(self._note("workspace", measured))
        stop = settle(motion.step, motion.bend, bounds)
        low, high = 0.0, 1.0
        for _ in range(6):
            share = 0.5 * (low + high)
            bend = stop + share * (wanted - stop)
            low, high = (share, high) if fits(bend) and self._safe(bend, motion, bounds).all() else (low, share)
        return stop + low * (wanted - stop)

    def _record(
        self, done: list[Intervention], kind: str, where: Mask, value: Array, limit: Array, time: float
    ) -> None:
        names = self.limits.names
        done += [Intervention(kind, names[j], float(value[j]), float(limit[j]), time) for j in np.flatnonzero(where)]

    def _note(self, kind: str, measured: Measured) -> Intervention:
        return Intervention(kind, "", np.nan, np.nan, measured.time)


def read_command(command: Any, joints: int) -> Array | str:
    """`command` as finite numbers `(J,)`, or the check that it fails: `shape` or `finite`."""
    try:
        given = np.array(command)
        if given.shape != (joints,) or given.dtype.kind not in "fiu":  # no text, dates, complex or other objects
            return "shape"
        if np.ma.is_masked(command):  # what lies behind a mask is no number
            return "finite"
        with np.errstate(over="ignore"):  # longer floats become infinite
            wish = given.astype(np.float64)
    except Exception:  # whatever it is, it is no command
        return "shape"
    return np.clip(wish, -HUGE, HUGE) if np.isfinite(wish).all() else "finite"


def approach(target: Array, before: Array, motion: Motion, bounds: Bounds) -> Array:
    """The step `(J,)` that catches up with a target in as little time as the limits allow, hardly overshooting it.

    The speed relative to the target, which moved from `before` to `target`, is the one that can be braked on the way
    that is left: w^2 / (2 B) + w B / (2 D) for a speed w, largest bend B and snap D, or w sqrt(w / D) where the brake
    is over before it reaches B; and half a period's motion, because the bend counts from the next period on. Off the
    way comes what is covered until the present bend, if it adds speed, has been taken back.
    """
    feed = np.clip(target - before, -bounds.step, bounds.step)
    way = target - feed - motion.position
    toward = np.copysign(1.0, way)
    periods = np.abs(motion.bend) / bounds.snap
    covered = toward * periods * (motion.step - feed + motion.bend * periods / 3.0)
    left = np.maximum(np.abs(way) - np.where(toward * motion.bend > 0, np.maximum(covered, 0.0), 0.0), 0.0)
    half = 0.5 * bounds.bend / bounds.snap
    short = np.cbrt(bounds.snap * left**2)
    speed = np.where(
        short < 2.0 * half * bounds.bend, short, bounds.bend * (np.sqrt(half**2 + 2.0 * left / bounds.bend) - half)
    )
    speed = speed * left / (left + 0.5 * speed + np.finfo(np.float64).tiny)
    return np.where(speed < np.abs(way), feed + toward * speed, target - motion.position)
