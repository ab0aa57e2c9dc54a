"""Tasks of mjlab under short names: velocity tracking of legged robots, lifting with an arm, cart-poles."""

from __future__ import annotations

from dataclasses import replace

from robopolicy.plugins import load
from robopolicy.sim.registry import TaskEntry, backend_entry
from robopolicy.sim.registry import register as register_entry

# Name -> mjlab id, description.
TASKS = {
    "cartpole_balance": ("Mjlab-Cartpole-Balance", "Keep the pole of a cart upright."),
    "cartpole_swingup": ("Mjlab-Cartpole-Swingup", "Swing the pole of a cart up and keep it there."),
    "go1_flat": ("Mjlab-Velocity-Flat-Unitree-Go1", "Walk a Unitree Go1 at the commanded velocity on flat ground."),
    "go1_rough": ("Mjlab-Velocity-Rough-Unitree-Go1", "Walk a Unitree Go1 at the commanded velocity on rough ground."),
    "g1_flat": ("Mjlab-Velocity-Flat-Unitree-G1", "Walk a Unitree G1 at the commanded velocity on flat ground."),
    "g1_rough": ("Mjlab-Velocity-Rough-Unitree-G1", "Walk a Unitree G1 at the commanded velocity on rough ground."),
    "lift_cube": ("Mjlab-Lift-Cube-Yam", "Lift a cube to a commanded position with an i2rt YAM arm."),
}


def register() -> None:
    """Register every task without importing mjlab."""
    for task, (env_id, description) in TASKS.items():
        register_entry(replace(backend_entry("mjlab", env_id, f"mjlab/{task}", description), chunk=(1, 1)))
    swing_up = "robopolicy_tasks.mjlab.cartpole"
    register_entry(
        TaskEntry(
            "mjlab/cartpole_swingup_sparse",
            lambda options: load(f"{swing_up}:make_sparse_swingup")(options),
            "Swing the pole of mjlab's cart up; the reward counts the steps in which it is upright.",
            make_expert=lambda: load(f"{swing_up}:SwingUpExpert")(),
            backends=("mjlab",),
            requires="mjlab",
            chunk=(4, 4),
        )
    )
