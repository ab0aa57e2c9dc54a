"""Velocity tracking with legged robots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from robopolicy.sim.registry import SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

_TASKS = {
    "go1": ("NOMINAL", "", "Follow velocity commands with a Unitree Go1 on level ground."),
    "go1_randomized": (
        "TRAINING",
        "velocity/go1",
        "Like go1, with random friction, payload, motors, sensor noise and pushes.",
    ),
}


def _maker(name: str, ranges: str) -> Callable[[SimOptions], VectorSim]:
    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.mujoco.backend import make_mujoco
        from robopolicy_tasks.velocity import randomization
        from robopolicy_tasks.velocity.go1 import Go1

        return make_mujoco(Go1(name, options.reward, getattr(randomization, ranges)), options)

    return make


def register() -> None:
    """Register the family without importing MuJoCo."""
    for short, (ranges, nominal, description) in _TASKS.items():
        name, make = f"velocity/{short}", _maker(f"velocity/{short}", ranges)
        settings: dict[str, Any] = {"success": "last", "chunk": (1, 1), "nominal": nominal}
        register_entry(TaskEntry(name, make, description, backends=("mujoco", "mujoco-exact", "warp"), **settings))
