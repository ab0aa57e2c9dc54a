"""Volleyball drills for drones on the native MuJoCo backends: bump, hit, pass (VolleyBots, S132)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from robopolicy.sim.registry import Expert, SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

_TASKS = {
    "bump": ("Bump", "Keep a ball up with the paddle of a quadrotor, by the thrust of its rotors."),
    "hit": ("Hit", "Hit a falling ball over the net to a mark with a quadrotor."),
    "pass": ("Pass", "Bump a ball to and fro between two quadrotors that one policy flies."),
}


def _maker(task: str) -> Callable[[SimOptions], VectorSim]:
    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.mujoco.make import make_mujoco
        from robopolicy_tasks.volley import drills

        return make_mujoco(getattr(drills, task)(options.reward), options)

    return make


def _make_expert() -> Expert:
    from robopolicy_tasks.volley.juggler import Juggler

    return Juggler()


def register() -> None:
    """Register the family without importing MuJoCo."""
    for short, (task, description) in _TASKS.items():
        register_entry(
            TaskEntry(
                name=f"volley/{short}",
                make=_maker(task),
                description=description,
                make_expert=_make_expert,
                backends=("mujoco", "mujoco-exact"),
            )
        )
