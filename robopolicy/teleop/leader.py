"""Joint targets that follow a leader arm."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import JointLimits
from robopolicy.errors import UserError
from robopolicy.teleop.action_map import GRIPPER
from robopolicy.teleop.contract import Array


class LeaderFollower:
    """Joint targets that follow a leader arm within limits.

    They move by the motion of the arm since the person enabled it (clutch); a gripper takes the fraction of its range.
    Without the switch the last target is kept.

    Args:
        limits: Limits of the targets; grippers, whose names contain "gripper", need a range.
        control_dt: Time between two targets [s].
        target: Initial target `(J,)` [rad or m].
        margin: Fraction of a joint's range kept free at either end, as by the filter of the robot.
    """

    def __init__(
        self, limits: JointLimits, control_dt: float, target: Array, margin: float = FilterConfig.margin
    ) -> None:
        self._names, self._low, self._high = limits.names, limits.position_low, limits.position_high
        self._is_gripper = np.array([GRIPPER in name for name in limits.names])
        if not np.isfinite((self._high - self._low)[self._is_gripper]).all():
            raise UserError("A gripper that follows a leader arm needs a range; set its low and high.")
        self._filter = SafetyFilter(limits, FilterConfig("absolute", margin))
        width = self._high - self._low
        self._free = np.where(np.isfinite(width), margin * width, 0.0)  # (J,) kept free at either end
        self._dt = control_dt
        self.reset(target)

    def reset(self, target: Array | None = None) -> None:
        """Come to rest at `target` `(J,)` within the margins, by default the last one, with a new clutch."""
        target = self._target if target is None else np.array(target, np.float64)
        self._target = np.clip(target, self._low + self._free, self._high - self._free)
        self._state = FilterState.at_rest(self._target)
        self._clutch: Array | None = None  # (J,) device minus target, while enabled

    @property
    def at_rest(self) -> bool:
        """Whether the target does not move."""
        return self._state.motion.at_rest

    def move(self, joints: Mapping[str, float] | None, now: float) -> Array:
        """Next target `(J,)` for the joints of the arm, or None without the switch, at `now` [s].

        Raises:
            UserError: The arm lacks a joint.
        """
        if joints is None:
            self._clutch = None
            self._target, self._state = self._filter.hold(self._state, self._dt)
            return self._target
        check_leader(joints, self._names)
        device = np.array([joints[name] for name in self._names])
        if self._clutch is None:
            self._clutch = device - self._target
        goal = device - self._clutch
        grip = self._is_gripper
        goal[grip] = (self._low + device * (self._high - self._low))[grip]
        measured = JointMeasurement(now, *np.full((3, len(goal)), np.nan))
        self._target, self._state, _ = self._filter.step(goal, self._state, measured, self._dt)
        return self._target


def check_leader(joints: Mapping[str, float], names: tuple[str, ...]) -> None:
    """Raise `UserError` if a leader arm lacks one of the joints `names`."""
    if missing := [name for name in names if name not in joints]:
        raise UserError(f"The leader arm has the joints {', '.join(joints)}, and lacks {', '.join(missing)}.")
