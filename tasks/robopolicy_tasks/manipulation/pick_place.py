"""Pick and place: carry a cube to a pad on the table and release it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, BatchState, namespace
from robopolicy.sim.batch_generator import rejection_sample
from robopolicy_tasks.manipulation.lift import CUBE_HALF, CUBE_HIGH, CUBE_LOW, CUBE_NAMES, CUBE_YAW, CubeTask
from robopolicy_tasks.manipulation.objects import distance, nearness
from robopolicy_tasks.manipulation.panda_task import Arm
from robopolicy_tasks.poses import upright

PAD_RADIUS = 0.03  # [m] maximum distance between the centres of cube and pad for success
MIN_DISTANCE = 0.14  # [m] minimum distance between cube and pad at the start
RESTING = 0.006  # [m] maximum height of a resting cube above the table
RELEASED = 0.055  # [m] minimum width of the gripper after release
CARRY_HEIGHT = 0.08  # [m] height of the carried cube above the table, for `shaping_potential`


class PickPlace(CubeTask):
    """Cube and pad at random positions; success when the released cube rests on the pad for three steps."""

    name = "manipulation/pick_place"
    scene = "pick_place"
    scene_names = (*CUBE_NAMES, "pad_x [m]", "pad_y [m]", *(f"pad_minus_cube_{axis} [m]" for axis in "xyz"))
    max_episode_steps = 100

    def __init__(self, reward: Literal["sparse", "shaped"] = "sparse") -> None:
        super().__init__(reward)
        self._pad = self.qpos_range("pad_x", "pad_y")

    def reset_scene(self, rng: np.random.Generator) -> dict[str, Array]:
        """Sample the pose of the cube and a distant position of the pad."""
        cube = rng.uniform(CUBE_LOW, CUBE_HIGH)

        def accept(pad: Array, rows: Any) -> Any:
            return np.hypot(*(pad - cube[rows]).T) >= MIN_DISTANCE

        pad = rejection_sample(rng, CUBE_LOW, CUBE_HIGH, accept)
        yaw = rng.uniform(-CUBE_YAW, CUBE_YAW)
        pose = upright(cube[..., 0], cube[..., 1], CUBE_HALF, yaw)
        return {"cube": pose, "pad_x": pad[..., :1], "pad_y": pad[..., 1:]}

    def goal(self, state: BatchState) -> Array:
        """Goal position `(N, 3)` [m] of the centre of the cube."""
        pad = state.qpos[:, self._pad]
        xp = namespace(pad)
        return xp.concat([pad, xp.full_like(pad[:, :1], CUBE_HALF)], axis=1)

    def scene_obs(self, arm: Arm, state: BatchState) -> Array:
        """Cube, pad and the offset of the goal from the cube `(N, 17)`."""
        goal, cube = self.goal(state), self.cube_obs(arm, state)
        return namespace(goal).concat([cube, goal[:, :2], goal - self.cube(state)[0]], axis=1)

    def is_success(self, arm: Arm, state: BatchState) -> NDArray[np.bool_]:
        """Whether the cube rests on the pad and is released."""
        cube, _ = self.cube(state)
        on_pad = distance(cube[:, :2], self.goal(state)[:, :2]) < PAD_RADIUS
        return on_pad & (cube[:, 2] < CUBE_HALF + RESTING) & (arm.width > RELEASED)

    def shaping_potential(self, arm: Arm, state: BatchState) -> Array:
        """One fifth each for reaching, grasping and lifting, two fifths for approaching the goal."""
        cube, _ = self.cube(state)
        xp, held = namespace(cube), self.held(arm, state)
        off = distance(cube[:, :2], self.goal(state)[:, :2])
        arrived = off < PAD_RADIUS
        reach = xp.where(arrived, 1.0, nearness(distance(cube, arm.tool.position), 0.15))
        height = xp.where(arrived, 1.0, held * xp.clip((cube[:, 2] - CUBE_HALF) / CARRY_HEIGHT, 0.0, 1.0))
        return (reach + (held | arrived) + height + 2.0 * nearness(off, 0.15)) / 5.0
