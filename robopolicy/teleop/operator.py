"""Actions of a person: commands of an input device, shaped and limited by the safety filter of `deploy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import JointLimits
from robopolicy.errors import UserError
from robopolicy.sim.contract import SimSpec
from robopolicy.teleop.action_map import GRIPPER, ActionMap
from robopolicy.teleop.contract import AXES, Array, DeadManSwitch, Teleop, TeleopCommand, shape

FULL_SPEED_TIME = 0.1  # [s] time from rest to full speed, which the filter enforces
RANGE_TIME = 1.0  # [s] shortest time in which a leader arm moves a joint target through its range
OPEN = -1.0  # of the gripper, initially
AT_REST = 1e-6  # fraction of full speed that counts as rest


class HumanAction(NamedTuple):
    """Decision of a person for one control step."""

    action: Array  # (A,) within the bounds of the task
    acts: bool  # whether the person acts: the dead-man switch is held, or the motion has not yet stopped
    events: tuple[str, ...]  # events since the last decision


class HumanOperator:
    """Person at an input device that controls one environment or robot.

    A twist passes the safety filter as velocities: it is at most full speed and changes within `FULL_SPEED_TIME`. The
    gripper keeps its last command. Joints of a leader arm move targets relative to the pose at which the person enabled
    the device (clutch), and pass the filter as positions; without the switch the last target is kept.

    Args:
        device: Input device.
        low: Lower bounds of the actions `(A,)`.
        high: Upper bounds of the actions `(A,)`.
        control_dt: Duration of an action [s].
        names: Names of the actions, e.g. "tool_dx [0.03 m]"; for leader arms the names of their joints.
        inputs: Map of `ActionMap.parse`; by default it follows from the names or the number of actions.
        scale: Fraction of full speed.
    """

    def __init__(
        self,
        device: Teleop,
        low: Array,
        high: Array,
        control_dt: float,
        names: tuple[str, ...] = (),
        inputs: tuple[str, ...] = (),
        scale: float = 1.0,
    ) -> None:
        self.device, self._low, self._high = device, np.asarray(low, float), np.asarray(high, float)
        self.switch = DeadManSwitch(springs_back=device.springs_back)
        self._dt, self._scale = control_dt, scale
        self._names = tuple(name.split(" [")[0] for name in names)
        self._map = ActionMap.parse(inputs, len(low)) if inputs else None
        self._velocity = SafetyFilter(_twist_limits(), FilterConfig("velocity"))
        self._position: SafetyFilter | None = None  # for leader arms
        self._clutch: dict[str, float] | None = None  # device minus target of every joint, while enabled
        self._target = (self._low + self._high) / 2  # (A,) of a leader arm
        self.reset()

    @classmethod
    def of_sim(cls, device: Teleop, spec: SimSpec, inputs: tuple[str, ...] = (), scale: float = 1.0) -> HumanOperator:
        """Create the operator of a simulated task."""
        low, high = spec.action_low.cpu().numpy(), spec.action_high.cpu().numpy()
        return cls(device, low, high, spec.control_dt, spec.action_names, inputs, scale)

    @property
    def action_dim(self) -> int:
        """Number of action dimensions A."""
        return len(self._low)

    def reset(self, target: Array | None = None) -> None:
        """Come to rest with an open gripper, for a new episode; `target` `(A,)` are the joint targets at its start."""
        self._gripper, self._clutch = OPEN, None
        self._state = FilterState.at_rest(np.zeros(len(AXES)))
        self._target = self._target if target is None else np.array(target, np.float64)
        self._joints = FilterState.at_rest(self._target)

    def move(self, now: float) -> HumanAction:
        """Decide at `now` [s, monotonic]."""
        command = self.switch.check(self.device.read(now), now)
        if command.joints is not None or self._clutch is not None:
            return self._follow(command, now)
        measured = JointMeasurement(now, *np.full((3, len(AXES)), np.nan))
        if command.enabled:
            twist, self._state, _ = self._velocity.step(
                self._scale * shape(command.twist), self._state, measured, self._dt
            )
        else:
            twist, self._state = self._velocity.hold(self._state, self._dt)
        if command.gripper:
            self._gripper = float(np.sign(command.gripper))
        if self._map is None:
            self._map = ActionMap.of_task(self._names, len(self._low))
        action = self._map.action(twist, self._gripper, self._low, self._high)
        return HumanAction(action, command.enabled or bool(np.abs(twist).max() > AT_REST), command.events)

    def _follow(self, command: TeleopCommand, now: float) -> HumanAction:
        """Move joint targets with a leader arm."""
        if self._position is None:
            self._position = SafetyFilter(_range_limits(self._names, self._low, self._high), FilterConfig("absolute"))
        if command.joints is None:
            self._clutch = None  # the last target is kept
            self._target, self._joints = self._position.hold(self._joints, self._dt)
        else:
            goal = self._goal(command.joints)
            measured = JointMeasurement(now, *np.full((3, len(self._low)), np.nan))
            self._target, self._joints, _ = self._position.step(goal, self._joints, measured, self._dt)
        return HumanAction(self._target, command.enabled or not self._joints.motion.at_rest, command.events)

    def _goal(self, joints: Mapping[str, float]) -> Array:
        """Joint targets `(A,)`: the target at enabling plus the motion of the device since then."""
        if missing := [name for name in self._names if name not in joints] or len(self._names) != len(self._low):
            found = ", ".join(joints)
            raise UserError(f"The leader arm has the joints {found}, which do not match the actions ({missing}).")
        if self._clutch is None:
            self._clutch = {name: joints[name] - target for name, target in zip(self._names, self._target, strict=True)}
        relative = np.array([joints[name] - self._clutch[name] for name in self._names])
        fraction = np.array([joints[name] for name in self._names])
        is_gripper = np.array([GRIPPER in name for name in self._names])
        return np.where(is_gripper, self._low + fraction * (self._high - self._low), relative)


def _twist_limits() -> JointLimits:
    ones = np.ones(len(AXES))
    return JointLimits(AXES, -np.inf * ones, np.inf * ones, ones, ones / FULL_SPEED_TIME, np.inf * ones, np.inf * ones)


def _range_limits(names: tuple[str, ...], low: Array, high: Array) -> JointLimits:
    speed, unlimited = (high - low) / RANGE_TIME, np.full(len(low), np.inf)
    return JointLimits(names, low, high, speed, speed / FULL_SPEED_TIME, unlimited, unlimited)
