"""Execution of commands by a simulated Panda: one controller per verb, batched over episodes.

A `Snapshot` is a complete simulation state, so that an episode can continue in any row of the
simulator. The result of a command depends only on the snapshot and the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import Array, BatchState, StepResult
from robopolicy_tasks.manipulation.experts import (
    CLOSE,
    OPEN,
    MotionStyle,
    approach_height,
    grasp_point,
    gripper_command,
    quarter_turn,
    tool_action,
)
from robopolicy_tasks.manipulation.lift import CUBE_HALF, LIFT_HEIGHT
from robopolicy_tasks.manipulation.objects import distance, yaw_of
from robopolicy_tasks.manipulation.panda_task import Arm, commanded
from robopolicy_tasks.manipulation.pick_place import RELEASED, RESTING, PickPlace
from robopolicy_tasks.text.commands import VERBS, RobotCommand

LIMITS = {"grasp": 60, "lift": 20, "carry": 50, "release": 30}  # maximum control steps of a command
HOVER = 0.08  # [m] of the hand above the cube before the descent, and of a carried cube above the table
RAISED = LIFT_HEIGHT + CUBE_HALF + 0.02  # [m] height of the tool at which "lift" ends
ARRIVED = 0.004  # [m] maximum distance from the target at the end of "carry"
LOWERED = CUBE_HALF + 0.003  # [m] height of the tool at which "release" opens
OPENING, EMPTY = 0.045, 0.01  # [m] width of the hand after release, and of an empty closed hand
STILL = 0.006  # [m] maximum lead of the commanded tool at the end of "carry"
REOPENED = 8  # control steps for opening a closed hand
AWAY = 0.10  # [m] height of the tool at which "release" ends


class EndlessPickPlace(PickPlace):
    """Pick and place without termination: the text task ends an episode."""

    max_episode_steps = max(LIMITS.values()) + 1

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Return zero reward without termination."""
        return StepResult(np.zeros(len(after)), np.zeros(len(after), bool))


@dataclass(frozen=True)
class Snapshot:
    """Simulation state at one time."""

    row: dict[str, Any]  # row of the simulator state
    cube: Array  # (3,) [m]
    pad: Array  # (2,) [m]
    width: float  # [m] between the fingers
    held: bool  # whether they hold the cube

    def rests_at(self, place: Array, radius: float) -> bool:
        """Whether the released cube is within `radius` [m] of a position `(2,)` on the table."""
        low = self.cube[2] < CUBE_HALF + RESTING
        return bool(low and self.width > RELEASED and np.hypot(*(self.cube[:2] - place)) < radius)

    @property
    def lifted(self) -> bool:
        """Whether the cube is held high above the table."""
        return bool(self.held and self.cube[2] > LIFT_HEIGHT + CUBE_HALF)


@dataclass(frozen=True)
class CommandRequest:
    """A command to execute, with its initial snapshot."""

    start: Snapshot
    command: RobotCommand
    target: Array  # (2,) [m] target of "carry"
    error: Array  # (2,) [m] position error of "grasp"


class Workcell:
    """Batched simulator that starts episodes and executes commands."""

    def __init__(self, rows: int = 64) -> None:
        self.task = EndlessPickPlace()
        self.sim = MujocoSim(self.task, rows)

    def start(self, seeds: Sequence[int]) -> list[Snapshot]:
        """Start episodes and return their snapshots."""
        found: list[Snapshot] = []
        for begin in range(0, len(seeds), self.sim.num_envs):
            block = list(seeds[begin : begin + self.sim.num_envs])
            self.sim.reset(block + block[:1] * (self.sim.num_envs - len(block)))
            found += self._snapshots(len(block))
        return found

    def run(self, requests: Sequence[CommandRequest]) -> list[Snapshot]:
        """Execute commands and return the snapshots after them."""
        found: list[Snapshot] = []
        for begin in range(0, len(requests), self.sim.num_envs):
            block = requests[begin : begin + self.sim.num_envs]
            self._place(block)
            self._run(block)
            found += self._snapshots(len(block))
        return found

    def close(self) -> None:
        """Stop the threads of the simulator."""
        self.sim.close()

    def _run(self, requests: Sequence[CommandRequest]) -> None:
        count, rows = len(requests), self.sim.num_envs
        verb = np.array([VERBS.index(request.command.verb) for request in requests])
        limit = np.array([LIMITS[request.command.verb] for request in requests])
        target, error = (np.array([getattr(request, name) for request in requests]) for name in ("target", "error"))
        style = MotionStyle(np.zeros(count, np.int64), np.full(count, HOVER), np.ones(count), error)
        running = np.ones(count, bool)
        action, active = np.zeros((rows, self.task.action_low.size)), np.zeros(rows, bool)
        every = np.arange(count)
        for step in range(int(limit.max())):
            state = self.sim.state(every)
            arm = self.task.arm(state)
            options = [move(self.task, arm, state, target, style, step) for move in MOVES]
            done = np.choose(verb, [finished for _, finished in options])
            running &= ~done & (step < limit)
            if not running.any():
                break
            action[:count] = np.choose(verb[:, None], [chosen for chosen, _ in options])
            active[:count] = running
            self.sim.step(torch.from_numpy(action).float(), torch.from_numpy(active))

    def _place(self, requests: Sequence[CommandRequest]) -> None:
        """Load the initial snapshots of commands into the rows of the simulator."""
        idle = [requests[0]] * (self.sim.num_envs - len(requests))
        rows = [request.start.row for request in (*requests, *idle)]
        parts = {
            part: {key: torch.stack([row[part][key] for row in rows]) for key in rows[0][part]} for part in rows[0]
        }
        seeds = {"current": torch.zeros(len(rows), dtype=torch.int64), "next": 0}
        self.sim.load_state_dict({**parts, "seeds": seeds, "steps": torch.zeros(len(rows), dtype=torch.int64)})

    def _snapshots(self, count: int) -> list[Snapshot]:
        whole = self.sim.state_dict()
        parts = {part: whole[part] for part in ("engine", "memory", "obs")}
        state = self.sim.state()
        arm = self.task.arm(state)
        (cube, _), pad, held = self.task.cube(state), self.task.goal(state), self.task.held(arm, state)
        return [
            Snapshot(
                {part: {key: value[row].clone() for key, value in values.items()} for part, values in parts.items()},
                cube[row].copy(),
                pad[row, :2].copy(),
                float(arm.width[row]),
                bool(held[row]),
            )
            for row in range(count)
        ]


Motion = tuple[Array, NDArray[np.bool_]]
"""Actions `(N, 5)` of a controller, and whether it has finished `(N,)`."""


def grasp(task: EndlessPickPlace, arm: Arm, state: BatchState, target: Array, style: MotionStyle, step: int) -> Motion:
    """Move above the estimated position of the cube, descend and close."""
    held = task.held(arm, state)
    cube, quaternion = task.cube(state)
    estimate = grasp_point(cube, style)
    goal, turn = estimate.copy(), quarter_turn(yaw_of(quaternion) - commanded(state)["yaw"])
    goal[:, 2] = approach_height(estimate, turn, arm, style)
    missed = (arm.width < EMPTY) & (step > REOPENED)
    return tool_action(goal, turn, gripper_command(estimate, arm), state, style), held | missed


def lift(task: EndlessPickPlace, arm: Arm, state: BatchState, target: Array, style: MotionStyle, step: int) -> Motion:
    """Raise the hand with the gripper unchanged."""
    goal = commanded(state)["position"] + np.array([0.0, 0.0, 0.1])
    return tool_action(goal, np.zeros(len(goal)), _hold_gripper(arm), state, style), arm.tool.position[:, 2] > RAISED


def carry(task: EndlessPickPlace, arm: Arm, state: BatchState, target: Array, style: MotionStyle, step: int) -> Motion:
    """Rise, travel once clear of the table, and stop above the target; a held cube keeps its offset in the hand."""
    tool, (cube, _) = arm.tool.position, task.cube(state)
    held = task.held(arm, state)
    point = np.where(held[:, None], cube, tool)
    clear = np.clip((point[:, 2] - CUBE_HALF) / (0.5 * HOVER), 0.0, 1.0)[:, None]
    goal = tool.copy()
    goal[:, :2] += clear * (target - point[:, :2])
    goal[:, 2] += CUBE_HALF + HOVER - point[:, 2]
    still = distance(commanded(state)["position"], tool) < STILL
    there = still & (distance(point[:, :2], target) < ARRIVED) & (clear[:, 0] == 1.0)
    return tool_action(goal, np.zeros(len(goal)), _hold_gripper(arm), state, style), there


def release(
    task: EndlessPickPlace, arm: Arm, state: BatchState, target: Array, style: MotionStyle, step: int
) -> Motion:
    """Descend, open and withdraw."""
    tool = arm.tool.position
    opening = (tool[:, 2] < LOWERED) | (arm.width > OPENING)
    goal = commanded(state)["position"].copy()
    goal[:, 2] = np.where(arm.width > RELEASED, tool[:, 2] + 0.1, np.where(opening, tool[:, 2], CUBE_HALF - 0.002))
    away = (tool[:, 2] > AWAY) & (arm.width > RELEASED)
    return tool_action(goal, np.zeros(len(goal)), np.where(opening, OPEN, CLOSE), state, style), away


MOVES = (grasp, lift, carry, release)  # in the order of VERBS


def _hold_gripper(arm: Arm) -> Array:
    return np.where(arm.width > RELEASED, OPEN, CLOSE)
