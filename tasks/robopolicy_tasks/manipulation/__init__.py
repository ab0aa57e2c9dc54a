"""Franka Panda manipulation on the native MuJoCo backends: lift, pick_place, drawer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from robopolicy.sim.registry import Expert, SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

# Module -> class, description, actions per chunk.
_TASKS = {
    "lift": ("Lift", "Lift a cube from the table.", 4),
    "pick_place": ("PickPlace", "Carry a cube to a pad on the table and release it.", 4),
    "drawer": ("Drawer", "Grasp the handle of a drawer and pull it open.", 8),
}


def _maker(module: str, task: str) -> Callable[[SimOptions], VectorSim]:
    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.mujoco.backend import make_mujoco

        task_class = getattr(import_module(f"robopolicy_tasks.manipulation.{module}"), task)
        return make_mujoco(task_class(options.reward), options)

    return make


def _expert_maker(task: str) -> Callable[[], Expert]:
    def make() -> Expert:
        return getattr(import_module("robopolicy_tasks.manipulation.experts"), f"{task}Expert")()

    return make


def register() -> None:
    """Register the family without importing MuJoCo."""
    for module, (task, description, chunk) in _TASKS.items():
        name, make, make_expert = f"manipulation/{module}", _maker(module, task), _expert_maker(task)
        backends = ("mujoco", "mujoco-exact", "warp")
        sizes = chunk, chunk
        register_entry(TaskEntry(name, make, description, make_expert, backends=backends, success="end", chunk=sizes))
