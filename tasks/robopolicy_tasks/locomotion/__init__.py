"""Gymnasium's MuJoCo robots (v5) on the native backend, bit-equal to gymnasium with the exact engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from robopolicy.sim.registry import SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

_TASKS = {
    "ant": ("Ant-v5", "Walk forward on four legs (contact forces are observed)."),
    "half_cheetah": ("HalfCheetah-v5", "Run forward with a planar two-legged robot."),
    "hopper": ("Hopper-v5", "Hop forward on one leg without falling."),
    "humanoid": ("Humanoid-v5", "Walk forward with a humanoid (inertias and forces are observed)."),
    "inverted_pendulum": ("InvertedPendulum-v5", "Keep a pole upright on a cart."),
    "swimmer": ("Swimmer-v5", "Swim forward with three links."),
    "walker2d": ("Walker2d-v5", "Walk forward on two planar legs without falling."),
}


def _maker(name: str, env_id: str) -> Callable[[SimOptions], VectorSim]:
    def make(options: SimOptions) -> VectorSim:
        from robopolicy_tasks.locomotion.make import make_locomotion

        return make_locomotion(name, env_id, options)

    return make


def register() -> None:
    """Register the family without importing MuJoCo."""
    for short, (env_id, description) in _TASKS.items():
        name = f"locomotion/{short}"
        backends = ("mujoco", "mujoco-exact", "warp", "envpool", "gymnasium")
        register_entry(
            TaskEntry(name, _maker(name, env_id), description, backends=backends, success="none", chunk=(1, 1))
        )
