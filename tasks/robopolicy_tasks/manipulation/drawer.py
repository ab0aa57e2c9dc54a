"""Drawer: grasp the handle of a drawer and pull it open."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, BatchState, namespace
from robopolicy_tasks.manipulation.objects import distance, nearness
from robopolicy_tasks.manipulation.panda_task import Arm, PandaTask

HANDLE = (-0.148, 0.0, 0.06)  # [m] centre of the handle in the cabinet frame, drawer closed
HANDLE_WIDTH = 0.016  # [m] between the finger pads
CABINET_LOW: Array = np.array([0.62, -0.12, -0.30])  # x [m], y [m], yaw [rad] at the start
CABINET_HIGH: Array = np.array([0.68, 0.12, 0.30])
START_OPENING = 0.02  # [m] maximum opening at the start
OPENED = 0.12  # [m] opening required for success, of 0.16 m


class Drawer(PandaTask):
    """Cabinet at a random pose; success when its drawer is open by 12 cm for three steps."""

    name = "manipulation/drawer"
    scene = "drawer"
    scene_names = (
        *(f"handle_{axis} [m]" for axis in "xyz"),
        *(f"handle_minus_tool_{axis} [m]" for axis in "xyz"),
        "cabinet_yaw_sin",
        "cabinet_yaw_cos",
        "opening [m]",
    )
    max_episode_steps = 80

    def __init__(self, reward: Literal["sparse", "shaped"] = "sparse") -> None:
        super().__init__(reward)
        self._cabinet = self.qpos_range("cabinet_x", "cabinet_y", "cabinet_yaw")
        self._drawer = self.qpos_range("drawer").start

    def reset_scene(self, rng: np.random.Generator) -> dict[str, Array]:
        """Sample position and heading of the cabinet and the initial opening of the drawer."""
        pose = rng.uniform(CABINET_LOW, CABINET_HIGH)
        opening = rng.uniform(0.0, START_OPENING, 1)
        parts = {name: pose[..., i : i + 1] for i, name in enumerate(("cabinet_x", "cabinet_y", "cabinet_yaw"))}
        return parts | {"drawer": opening}

    def opening(self, state: BatchState) -> Array:
        """Opening of the drawer `(N,)` [m]."""
        return state.qpos[:, self._drawer]

    def cabinet_yaw(self, state: BatchState) -> Array:
        """Heading of the cabinet `(N,)` [rad]; the drawer opens in the opposite direction."""
        return state.qpos[:, self._cabinet][:, 2]

    def handle(self, state: BatchState) -> Array:
        """Centre of the handle `(N, 3)` [m]."""
        x, y, yaw = state.qpos[:, self._cabinet].T
        xp, along = namespace(yaw), HANDLE[0] - self.opening(state)
        return xp.stack([x + xp.cos(yaw) * along, y + xp.sin(yaw) * along, xp.full_like(x, HANDLE[2])], axis=1)

    def scene_obs(self, arm: Arm, state: BatchState) -> Array:
        """Handle, its offset from the tool, heading and opening `(N, 9)`."""
        handle, yaw = self.handle(state), self.cabinet_yaw(state)
        xp = namespace(yaw)
        rest = xp.stack([xp.sin(yaw), xp.cos(yaw), self.opening(state)], axis=1)
        return xp.concat([handle, handle - arm.tool.position, rest], axis=1)

    def is_success(self, arm: Arm, state: BatchState) -> NDArray[np.bool_]:
        """Whether the drawer is open far enough."""
        return self.opening(state) > OPENED

    def shaping_potential(self, arm: Arm, state: BatchState) -> Array:
        """One third for reaching the handle, two thirds for opening."""
        reach = nearness(distance(self.handle(state), arm.tool.position), 0.15)
        return (reach + 2.0 * namespace(reach).clip(self.opening(state) / OPENED, 0.0, 1.0)) / 3.0
