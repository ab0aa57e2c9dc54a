"""Legged robots that follow commanded velocities."""

from __future__ import annotations

from collections.abc import Callable

from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

_TASKS = {
    "go1": "Follow velocity commands with a Unitree Go1 on level ground.",
    "go1_randomized": "The same under random friction, payload, motor strength, sensor noise and pushes; train on it.",
}


def _maker(name: str) -> Callable[[SimOptions], VectorSim]:
    def make(options: SimOptions) -> VectorSim:
        from tasks.velocity.make import make_velocity

        return make_velocity(name, options)

    return make


def register() -> None:
    """Register the family without importing MuJoCo."""
    for short, description in _TASKS.items():
        name = f"velocity/{short}"
        register_entry(TaskEntry(name, _maker(name), description, backends=("mujoco", "mujoco-exact")))
