"""Lift: raise a cube from the table."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, BatchState, namespace
from robopolicy_tasks.manipulation.objects import distance, nearness
from robopolicy_tasks.manipulation.panda_task import Arm, PandaTask
from robopolicy_tasks.poses import rotation_columns, upright

CUBE_HALF = 0.02  # [m]
CUBE_LOW: Array = np.array([0.40, -0.15])  # [m] initial position of the cube
CUBE_HIGH: Array = np.array([0.60, 0.15])  # [m]
CUBE_YAW = np.pi / 5  # [rad] maximum initial yaw; a quarter turn is equivalent
LIFT_HEIGHT = 0.10  # [m] above the table, lower face of the cube
GRASP_RADIUS = 0.025  # [m] maximum distance between tool and centre of a grasped cube
CUBE_NAMES = (
    *(f"cube_{axis} [m]" for axis in "xyz"),
    *(f"cube_rotation_{column}{row}" for column in "xy" for row in "xyz"),
    *(f"cube_minus_tool_{axis} [m]" for axis in "xyz"),
)


class CubeTask(PandaTask):
    """Panda task with one cube; base of lift and pick_place."""

    def __init__(self, reward: Literal["sparse", "shaped"] = "sparse") -> None:
        super().__init__(reward)
        self._cube = self.qpos_range("cube")

    def cube(self, state: BatchState) -> tuple[Array, Array]:
        """Position `(N, 3)` [m] and quaternion `(N, 4)` of the cube."""
        pose = state.qpos[:, self._cube]
        return pose[:, :3], pose[:, 3:]

    def cube_obs(self, arm: Arm, state: BatchState) -> Array:
        """Cube observation `(N, 12)` with the names `CUBE_NAMES`."""
        position, quaternion = self.cube(state)
        return namespace(position).concat(
            [position, rotation_columns(quaternion)[:, :6], position - arm.tool.position], axis=1
        )

    def held(self, arm: Arm, state: BatchState) -> NDArray[np.bool_]:
        """Whether the finger pads grasp the cube `(N,)`."""
        near = distance(self.cube(state)[0], arm.tool.position) < GRASP_RADIUS
        return near & (arm.width < 2 * CUBE_HALF + 0.01)


class Lift(CubeTask):
    """Cube at a random pose on the table; success when held 10 cm above the table for three steps."""

    name = "manipulation/lift"
    scene = "lift"
    scene_names = CUBE_NAMES
    max_episode_steps = 60

    def reset_scene(self, rng: np.random.Generator) -> dict[str, Array]:
        """Sample the pose of the cube."""
        cube = rng.uniform(CUBE_LOW, CUBE_HIGH)
        return {"cube": upright(cube[..., 0], cube[..., 1], CUBE_HALF, rng.uniform(-CUBE_YAW, CUBE_YAW))}

    def scene_obs(self, arm: Arm, state: BatchState) -> Array:
        """Pose of the cube and its offset from the tool `(N, 12)`."""
        return self.cube_obs(arm, state)

    def is_success(self, arm: Arm, state: BatchState) -> NDArray[np.bool_]:
        """Whether the cube is held high enough."""
        return self.held(arm, state) & (self.cube(state)[0][:, 2] > LIFT_HEIGHT + CUBE_HALF)

    def shaping_potential(self, arm: Arm, state: BatchState) -> Array:
        """One third each for reaching, grasping and lifting."""
        position, _ = self.cube(state)
        held = self.held(arm, state)
        height = namespace(position).clip((position[:, 2] - CUBE_HALF) / LIFT_HEIGHT, 0.0, 1.0)
        return (nearness(distance(position, arm.tool.position), 0.15) + held + held * height) / 3.0
