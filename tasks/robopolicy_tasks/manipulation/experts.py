"""Scripted demonstrators that read the true state of the simulator.

Each expert is a function of the current state (reach, then close, then carry), so demonstrations are easy to imitate
and experts recover from disturbances. Every episode has its own style (hover height, speed, small grasp offset),
sampled from its seed, so that demonstrations differ and an episode depends only on its seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import Array, BatchState
from robopolicy.sim.backends.warp import WarpSim
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy_tasks.manipulation.drawer import HANDLE_WIDTH, Drawer
from robopolicy_tasks.manipulation.lift import CUBE_HALF, CubeTask
from robopolicy_tasks.manipulation.objects import distance, yaw_of
from robopolicy_tasks.manipulation.panda_task import POSITION_STEP, YAW_STEP, Arm, PandaTask, commanded
from robopolicy_tasks.manipulation.pick_place import PickPlace

OPEN, CLOSE = -1.0, 1.0
_STREAM = 0x5EED  # separates the random stream of the expert from the initial state


@dataclass(frozen=True)
class MotionStyle:
    """Style parameters of N episodes."""

    seed: NDArray[np.int64]  # (N,) episode of the style
    hover: Array  # (N,) [m] height above the object before descending
    speed: Array  # (N,) fraction of the full step
    offset: Array  # (N, 2) [m] grasp point relative to the centre of the object

    @classmethod
    def of(cls, count: int) -> MotionStyle:
        """Empty styles for `count` episodes."""
        return cls(np.full(count, -1), np.zeros(count), np.zeros(count), np.zeros((count, 2)))

    def sample(self, seeds: NDArray[np.int64]) -> None:
        """Sample the style of every row whose episode `seeds` `(N,)` is new."""
        for row in np.flatnonzero(self.seed != seeds):
            rng = np.random.default_rng([_STREAM, int(seeds[row])])
            self.seed[row] = seeds[row]
            self.hover[row] = rng.uniform(0.05, 0.10)
            self.speed[row] = rng.uniform(0.7, 1.0)
            self.offset[row] = rng.uniform(-0.004, 0.004, 2)


class PandaExpert(ABC):
    """Base class of experts with a style per episode."""

    def __init__(self) -> None:
        self._style = MotionStyle.of(0)

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, 5)` for the current state of the simulator."""
        task = getattr(sim, "task", None)
        if not isinstance(sim, MujocoSim | WarpSim) or not isinstance(task, PandaTask):
            raise UserError("The scripted Panda experts need a manipulation task on a native MuJoCo backend.")
        if len(self._style.seed) != sim.num_envs:
            self._style = MotionStyle.of(sim.num_envs)
        self._style.sample(sim.episode_seed.cpu().numpy())
        state = sim.state().on_host()
        return torch.from_numpy(self.act(task, task.arm(state), state, self._style)).float().to(sim.device)

    @abstractmethod
    def act(self, task: PandaTask, arm: Arm, state: BatchState, style: MotionStyle) -> Array:
        """Actions `(N, 5)`."""


class LiftExpert(PandaExpert):
    """Expert that hovers over the cube, descends while aligned, closes the gripper and lifts."""

    def act(self, task: PandaTask, arm: Arm, state: BatchState, style: MotionStyle) -> Array:
        """Actions `(N, 5)`."""
        assert isinstance(task, CubeTask)
        cube, quaternion = task.cube(state)
        held = task.held(arm, state)
        goal, turn = grasp_point(cube, style), quarter_turn(yaw_of(quaternion) - commanded(state)["yaw"])
        goal[:, 2] = np.where(held, arm.tool.position[:, 2] + 0.1, approach_height(cube, turn, arm, style))
        return tool_action(goal, turn, gripper_command(cube, arm), state, style)


class PickPlaceExpert(PandaExpert):
    """Expert that grasps as in lift, carries the cube above the pad, descends, releases and withdraws."""

    def act(self, task: PandaTask, arm: Arm, state: BatchState, style: MotionStyle) -> Array:
        """Actions `(N, 5)`."""
        assert isinstance(task, PickPlace)
        cube, quaternion = task.cube(state)
        pad, held = task.goal(state), task.held(arm, state)
        off = distance(cube[:, :2], pad[:, :2])
        arrived = (off < 0.015) & (cube[:, 2] < CUBE_HALF + 0.004)
        turn = quarter_turn(yaw_of(quaternion) - commanded(state)["yaw"])
        grasp = grasp_point(cube, style)
        grasp[:, 2] = approach_height(cube, turn, arm, style)

        # Lift first, move after clearing the table, then descend above the pad with a constant tool offset.
        carry = pad + arm.tool.position - cube
        clear = np.clip((cube[:, 2] - CUBE_HALF) / (0.5 * style.hover), 0.0, 1.0)[:, None]
        carry[:, :2] = clear * carry[:, :2] + (1.0 - clear) * arm.tool.position[:, :2]
        carry[:, 2] += style.hover * np.clip((off - 0.008) / 0.03, 0.0, 1.0) - 0.002
        leave = arm.tool.position + np.array([0.0, 0.0, 0.1]) * (arm.width > 0.06)[:, None]

        goal = np.where(arrived[:, None], leave, np.where(held[:, None], carry, grasp))
        turn = np.where(held | arrived, 0.0, turn)
        gripper = np.where(arrived, OPEN, gripper_command(cube, arm))
        return tool_action(goal, turn, gripper, state, style)


class DrawerExpert(PandaExpert):
    """Expert that descends onto the handle, closes the gripper and pulls along the drawer."""

    def act(self, task: PandaTask, arm: Arm, state: BatchState, style: MotionStyle) -> Array:
        """Actions `(N, 5)`."""
        assert isinstance(task, Drawer)
        handle, yaw = task.handle(state), task.cabinet_yaw(state)
        turn = yaw - commanded(state)["yaw"]
        goal = handle.copy()
        goal[:, 2] = approach_height(handle, turn, arm, style)
        gripper = gripper_command(handle, arm)
        pulling = (gripper == CLOSE) & (arm.width < HANDLE_WIDTH + 0.006)
        pull = handle - 0.1 * np.stack([np.cos(yaw), np.sin(yaw), np.zeros_like(yaw)], axis=1)
        pull[:, 2] = arm.tool.position[:, 2]
        return tool_action(np.where(pulling[:, None], pull, goal), turn, gripper, state, style)


def grasp_point(cube: Array, style: MotionStyle) -> Array:
    """Grasp points `(N, 3)`: the centre of the cube plus the offset of the episode."""
    goal = cube.copy()
    goal[:, :2] += style.offset
    return goal


def quarter_turn(angle: Array) -> Array:
    """Smallest equivalent rotation of a cube, in [-pi/4, pi/4]."""
    return (angle + np.pi / 4) % (np.pi / 2) - np.pi / 4


def approach_height(target: Array, turn: Array, arm: Arm, style: MotionStyle) -> Array:
    """Target height `(N,)`: hover far from `target`, decreasing to its height as position and heading align."""
    off = distance(target[:, :2], arm.tool.position[:, :2]) + 0.05 * np.abs(turn)
    return target[:, 2] + style.hover * np.clip((off - 0.012) / 0.03, 0.0, 1.0)


def gripper_command(target: Array, arm: Arm) -> Array:
    """Gripper command `(N,)`: close when `target` is between the finger pads."""
    offset = np.abs(target - arm.tool.position)
    return np.where((offset[:, :2].max(axis=1) < 0.015) & (offset[:, 2] < 0.012), CLOSE, OPEN)


def tool_action(goal: Array, turn: Array, gripper: Array, state: BatchState, style: MotionStyle) -> Array:
    """Actions `(N, 5)` that move the commanded tool towards `goal` `(N, 3)` and turn it by `turn`."""
    move = np.clip((goal - commanded(state)["position"]) / POSITION_STEP, -1.0, 1.0) * style.speed[:, None]
    return np.concatenate([move, np.clip(turn / YAW_STEP, -1, 1)[:, None], gripper[:, None]], axis=1)
