"""Manipulation environments of OGBench (Park et al. 2024) with a random target per episode, and their oracles."""

from __future__ import annotations

from robopolicy_tasks.optional_envs import register_package_task

TASKS = {
    "cube-single-v0": "move a cube to a target pose",
    "cube-double-v0": "move one of two cubes to a target pose or onto the other",
    "cube-triple-v0": "move one of three cubes to a target pose or onto another",
    "scene-v0": "move a cube, press a button, or move a drawer or a window",
    "puzzle-3x3-v0": "press one of nine buttons",
    "puzzle-4x4-v0": "press one of sixteen buttons",
}


def register() -> None:
    """Register the family without importing OGBench."""
    for task, description in TASKS.items():
        register_package_task("ogbench", task, f"OGBench: {description}.", rewards=("sparse",))
