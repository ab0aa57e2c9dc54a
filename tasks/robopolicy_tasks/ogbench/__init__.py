"""OGBench (Park et al. 2024): its single tasks under their own ids, and its data-collection mode with visible targets.

Single tasks have the ids of the package, e.g. `ogbench/scene-singletask-task1-v0`; without `-task1` they are the
default task of the environment. `task.reward=shaped` is the reward of the package, `sparse` is -1 until success.
`ogbench/scene-oraclerep-v0` has a random one of the tasks per episode, whose goal is observed.

Tasks `ogbench_collect/<environment>` are the mode in which OGBench collects its data: a random target per episode, here
in the observation, and oracles. They are not the protocol of OGBench, and their scores do not compare with its results.
"""

from __future__ import annotations

from robopolicy.sim.registry import register_renamed
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
COLLECT = "ogbench_collect"  # prefix of the tasks in data-collection mode


def register() -> None:
    """Register the family without importing OGBench."""
    description = "OGBench: single tasks and goals of scene, cube, puzzle and mazes."
    register_package_family("ogbench", description, REWARDS, model_cameras=True)
    for task, description in TASKS.items():
        description = f"Data collection of OGBench, with the target visible: {description}."
        register_package_task("ogbench", task, description, ("sparse",), prefix=COLLECT, model_cameras=True)
        single = f"ogbench/{task.removesuffix('-v0')}-singletask-v0"
        register_renamed(f"ogbench/{task}", f"{COLLECT}/{task}", f"the protocol of OGBench is {single}.")
