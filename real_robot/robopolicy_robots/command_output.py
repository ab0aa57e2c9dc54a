"""Outputs of the control loop: commands on a topic, or goals of a trajectory controller."""

from __future__ import annotations

import time
from collections import deque
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from robopolicy.deploy.safety.filter import FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.interventions import SafetyIntervention
from robopolicy.deploy.safety.motion import Array
from robopolicy_robots.chunk_executor import ChunkExecutor
from robopolicy_robots.commands import command_message, trajectory_of
from robopolicy_robots.messages import CATALOGUE
from robopolicy_robots.robot import QOS_PROFILES, RobotSpec
from robopolicy_robots.transports.base import Transport

Filtered = tuple[Array, FilterState, tuple[SafetyIntervention, ...]]  # command, next state, interventions


class CommandOutput(Protocol):
    """Interface of outputs; `step` or `hold` computes the command of a tick, and `send` sends it."""

    streaming: ClassVar[bool]  # whether any target can be sent at any tick
    name: str  # peer of the output, for messages

    @property
    def matched(self) -> int:
        """Number of peers."""
        ...

    @property
    def failure(self) -> str:
        """Failure that the peer reports; empty without one."""
        ...

    def step(self, target: Array, state: FilterState, measured: JointMeasurement, due: float) -> Filtered:
        """Filter the target `(J,)` of the tick at `due` [s]."""
        ...

    def hold(self, state: FilterState, due: float) -> tuple[Array, FilterState]:
        """Command and next state of the fastest stop for the tick at `due` [s]."""
        ...

    def skip(self, state: FilterState, missed: int) -> FilterState:
        """State after missed ticks."""
        ...

    def send(self, command: Array) -> None:
        """Send the command `(J,)` of the tick."""

    def cancel(self) -> None:
        """Cancel a motion that the robot would continue without further messages."""


class TopicOutput:
    """Commands on a topic, one message per tick."""

    streaming: ClassVar[bool] = True
    failure = ""

    def __init__(self, robot: RobotSpec, transport: Transport, safety: SafetyFilter) -> None:
        command = robot.command
        self._robot, self._safety = robot, safety
        self._publisher = transport.advertise(command.topic, CATALOGUE[command.type], QOS_PROFILES[command.qos])
        self.name = f"subscriber of {command.topic}"

    @property
    def matched(self) -> int:
        """Number of subscribers."""
        return self._publisher.matched

    def step(self, target: Array, state: FilterState, measured: JointMeasurement, due: float) -> Filtered:
        """Filter the target."""
        return self._safety.step(target, state, measured, self._robot.dt)

    def hold(self, state: FilterState, due: float) -> tuple[Array, FilterState]:
        """Brake."""
        return self._safety.hold(state, self._robot.dt)

    def skip(self, state: FilterState, missed: int) -> FilterState:
        """Return the state: without a message the robot keeps its last command."""
        return state

    def send(self, command: Array) -> None:
        """Publish the command."""
        self._publisher.publish(command_message(self._robot, command))

    def cancel(self) -> None:
        """Do nothing: the last command is a position at rest, or a velocity of zero."""


class PlannedTick(NamedTuple):
    """Planned tick of a goal."""

    target: Array | None  # (J,) before the filter; None while braking
    command: Array  # (J,)
    state: FilterState  # after the tick


class TrajectoryOutput:
    """Goals of a trajectory controller: the rest of the actions of the policy, then the fastest stop.

    Every new chunk replaces the goal. Its points are the commands of the coming ticks, for which the filter assumes
    that the robot follows exactly. Every tick filters the planned target again with the measurement; where the result
    differs (the robot lags, or its effort is too high), a new goal replaces the plan. A stop before the end of the plan
    replaces it by a goal that brakes. Since every goal ends at rest, the robot also stops if this program or the
    network fails.
    """

    streaming: ClassVar[bool] = False

    def __init__(self, robot: RobotSpec, transport: Transport, safety: SafetyFilter, executor: ChunkExecutor) -> None:
        self._robot, self._safety, self._executor = robot, safety, executor
        self._planner = SafetyFilter(safety.limits, safety.config, safety.workspace)  # does not record its steps
        self._client = transport.trajectory_client(robot.command.topic)
        self.name = f"action server {robot.command.topic}"
        self._plan: deque[PlannedTick] = deque()
        self._goal: tuple[float, list[PlannedTick]] | None = None  # to send, with the due time [s] of this tick
        self._moving = False  # a goal was made and not canceled
        self._num_chunks = 0  # chunks of the executor in the plan

    @property
    def matched(self) -> int:
        """Number of action servers."""
        return self._client.matched

    @property
    def failure(self) -> str:
        """Failure of the goal."""
        return self._client.failure

    def step(self, target: Array, state: FilterState, measured: JointMeasurement, due: float) -> Filtered:
        """Follow the plan, or make a new one."""
        if self._num_chunks != self._executor.num_chunks or not self._plan or self._plan[0].target is None:
            self._follow(target, state, measured, due)
        result = self._safety.step(self._plan[0].target, state, measured, self._robot.dt)
        if not np.array_equal(result[0], self._plan[0].command):
            self._follow(target, state, measured, due)
            result = self._safety.step(target, state, measured, self._robot.dt)
        self._plan.popleft()
        return result

    def hold(self, state: FilterState, due: float) -> tuple[Array, FilterState]:
        """Continue the stop at the end of the plan, or replace the plan by a stop."""
        if self._moving and self._plan and self._plan[0].target is not None:
            self._make_goal([], state, due)
        elif not self._moving:
            self._client.cancel()  # again, until the goals have ended
        if not self._plan:
            return self._safety.hold(state, self._robot.dt)
        tick = self._plan.popleft()
        return tick.command, tick.state

    def skip(self, state: FilterState, missed: int) -> FilterState:
        """Return the state that the controller has reached meanwhile."""
        for _ in range(min(missed, len(self._plan))):
            state = self._plan.popleft().state
        return state

    def send(self, command: Array) -> None:
        """Send the goal that the tick has made, if any; its points are due at the times of the ticks."""
        if self._goal is not None:
            due, plan = self._goal
            elapsed = max(time.monotonic() - due, 0.0)
            merge_time = 0.0 if plan[0].target is None else self._client.merge_time  # a stop begins at once
            self._client.send(trajectory_of(self._robot, [tick.command for tick in plan], elapsed, merge_time))
            self._goal = None

    def cancel(self) -> None:
        """Cancel the goal; the controller then stops in its own way."""
        self._plan.clear()
        self._goal, self._moving = None, False
        self._client.cancel()

    def _follow(self, target: Array | None, state: FilterState, measured: JointMeasurement, due: float) -> None:
        """Plan the rest of the actions from the tick at `due` on."""
        ahead, plan, unknown = self._executor.fork(), [], np.full(len(self._robot.joints), np.nan)
        self._num_chunks, begin = self._executor.num_chunks, due
        while target is not None:
            command, state, _ = self._planner.step(target, state, measured, self._robot.dt)
            plan.append(PlannedTick(target, command, state))
            due += self._robot.dt
            measured = JointMeasurement(due, command, unknown, unknown)
            target = ahead.next_target(due, command)
        self._make_goal(plan, state, begin)

    def _make_goal(self, plan: list[PlannedTick], state: FilterState, due: float) -> None:
        """Make a goal of `plan`, from the tick at `due` on, and a stop from `state`."""
        plan = list(plan)
        while not state.motion.at_rest:
            command, state = self._planner.hold(state, self._robot.dt)
            plan.append(PlannedTick(None, command, state))
        self._plan, self._moving = deque(plan), True
        self._goal = (due, plan) if plan else None


def open_output(robot: RobotSpec, transport: Transport, safety: SafetyFilter, executor: ChunkExecutor) -> CommandOutput:
    """Open the output that the robot's description selects; raises `TransportError` if the transport lacks actions."""
    if robot.uses_action:
        return TrajectoryOutput(robot, transport, safety, executor)
    return TopicOutput(robot, transport, safety)
