"""Actions of a person: commands of an input device, shaped and limited by the safety filter of `deploy`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from robopolicy.deploy.contract import Observed
from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import JointLimits
from robopolicy.errors import UserError
from robopolicy.sim.contract import SimSpec
from robopolicy.teleop.action_map import ActionMap
from robopolicy.teleop.contract import AXES, Array, DeadManSwitch, Teleop, TeleopCommand, shape
from robopolicy.teleop.leader import LeaderFollower

FULL_SPEED_TIME = 0.1  # [s] time from rest to full speed, which the filter enforces
RANGE_TIME = 1.0  # [s] shortest time in which a leader arm moves a joint target through its range
OPEN = -1.0  # of the gripper, initially
AT_REST = 1e-6  # fraction of full speed that counts as rest


class HumanAction(NamedTuple):
    """Decision of a person for one control step."""

    action: Array  # (A,) within the bounds of the task
    acts: bool  # whether the person acts: the dead-man switch is held, or the motion has not yet stopped
    events: tuple[str, ...]  # events since the last decision


class Teleoperator(Protocol):
    """Person who moves a robot."""

    device: Teleop
    action_dim: int  # number of action dimensions A

    def reset(self) -> None:
        """Come to rest, for a new episode."""

    def anchor(self, obs: Observed) -> None:
        """Take the pose in `obs` as the one to start from: in a new episode, and after a policy has acted."""

    def move(self, now: float) -> HumanAction:
        """Decide at `now` [s, monotonic]."""
        ...


class HumanOperator:
    """Person at an input device that controls one environment or robot.

    A twist passes the safety filter as velocities: it is at most full speed and changes within `FULL_SPEED_TIME`. The
    gripper keeps its last command. Joints of a leader arm move targets (`LeaderFollower`).

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
        self.action_dim = len(low)
        self._map = ActionMap.parse(inputs, len(low)) if inputs else None
        self._velocity = SafetyFilter(_twist_limits(), FilterConfig("velocity"))
        self._leader: LeaderFollower | None = None  # from the first joints of the device on
        self._pose = (self._low + self._high) / 2  # (A,) first target of a leader arm
        self.reset()

    @classmethod
    def of_sim(cls, device: Teleop, spec: SimSpec, inputs: tuple[str, ...] = (), scale: float = 1.0) -> HumanOperator:
        """Create the operator of a simulated task."""
        low, high = spec.action_low.cpu().numpy(), spec.action_high.cpu().numpy()
        return cls(device, low, high, spec.control_dt, spec.action_names, inputs, scale)

    def reset(self, target: Array | None = None) -> None:
        """Come to rest with an open gripper, for a new episode; `target` `(A,)` are the joint targets at its start."""
        self._gripper = OPEN
        self._state = FilterState.at_rest(np.zeros(len(AXES)))
        self._pose = self._pose if target is None else np.array(target, np.float64)
        if self._leader is not None:
            self._leader.reset(target)

    def anchor(self, obs: Observed) -> None:
        """Do nothing: actions do not depend on the pose."""

    def move(self, now: float) -> HumanAction:
        """Decide at `now` [s, monotonic]."""
        command = self.switch.check(self.device.read(now), now)
        if command.joints is not None or self._leader is not None:
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
        if self._leader is None:
            if len(self._names) != len(self._low):
                raise UserError(
                    "A leader arm needs actions with the names of its joints, which the task does not give."
                )
            limits = _range_limits(self._names, self._low, self._high)
            self._leader = LeaderFollower(limits, self._dt, self._pose)
        target = self._leader.move(command.joints, now)
        return HumanAction(target, command.enabled or not self._leader.at_rest, command.events)


class LeaderOperator:
    """Person with a leader arm who moves the joints of a robot; without the switch the pose is kept.

    Args:
        device: Leader arm with the joints of the robot.
        limits: Limits of the robot.
        control_dt: Duration of an action [s].
        margin: Fraction of a joint's range that the robot keeps free at either end.
    """

    def __init__(
        self, device: Teleop, limits: JointLimits, control_dt: float, margin: float = FilterConfig.margin
    ) -> None:
        self.device = device
        self.switch = DeadManSwitch(springs_back=device.springs_back)
        self.action_dim = len(limits)
        self._follower = LeaderFollower(limits, control_dt, np.zeros(len(limits)), margin)

    def reset(self) -> None:
        """Come to rest; `anchor` then sets the pose."""
        self._follower.reset()

    def anchor(self, obs: Observed) -> None:
        """Start from the joint positions at the beginning of `state`, as measured."""
        self._follower.reset(np.asarray(obs["state"])[-1, : self.action_dim])

    def move(self, now: float) -> HumanAction:
        """Decide at `now` [s, monotonic]."""
        command = self.switch.check(self.device.read(now), now)
        target = self._follower.move(command.joints, now)
        return HumanAction(target, command.enabled or not self._follower.at_rest, command.events)


def _twist_limits() -> JointLimits:
    ones = np.ones(len(AXES))
    return JointLimits(AXES, -np.inf * ones, np.inf * ones, ones, ones / FULL_SPEED_TIME, np.inf * ones, np.inf * ones)


def _range_limits(names: tuple[str, ...], low: Array, high: Array) -> JointLimits:
    speed, unlimited = (high - low) / RANGE_TIME, np.full(len(low), np.inf)
    return JointLimits(names, low, high, speed, speed / FULL_SPEED_TIME, unlimited, unlimited)
