"""OGBench (Park et al. 2025): its single tasks under their own ids, and environments with a random target and oracles.

Ids of single tasks are those of the package, e.g. `ogbench/scene-singletask-task1-v0`; without `-task1` they are the
default task of the environment. `task.reward=shaped` is the reward of the package, `sparse` is -1 until success.
`ogbench/scene-oraclerep-v0` has a random one of the tasks per episode, whose goal is observed.
"""

from __future__ import annotations

from robopolicy_tasks.optional_envs import register_package_family, register_package_task

TASKS = {
    "cube-single-v0": "move a cube to a target pose",
    "cube-double-v0": "move one of two cubes to a target pose or onto the other",
    "cube-triple-v0": "move one of three cubes to a target pose or onto another",
    "scene-v0": "move a cube, press a button, or move a drawer or a window",
    "puzzle-3x3-v0": "press one of nine buttons",
    "puzzle-4x4-v0": "press one of sixteen buttons",
}

REWARDS = ("sparse", "shaped")  # of single tasks


def register() -> None:
    """Register the family without importing OGBench."""
    register_package_family("ogbench", "OGBench: single tasks and goals of scene, cube, puzzle and mazes.", REWARDS)
    for task, description in TASKS.items():
        register_package_task("ogbench", task, f"OGBench: {description}.", rewards=("sparse",))
