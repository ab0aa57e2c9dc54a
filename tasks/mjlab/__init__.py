"""Tasks of mjlab under short names: legged robots that follow a velocity, an arm that lifts a cube, cart-poles."""

from __future__ import annotations

from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry
from tasks.packages import refuse_cameras

# Name -> mjlab's id, what is to be done.
TASKS = {
    "cartpole_balance": ("Mjlab-Cartpole-Balance", "Keep the pole of a cart upright."),
    "cartpole_swingup": ("Mjlab-Cartpole-Swingup", "Swing the pole of a cart up and keep it there."),
    "go1_flat": ("Mjlab-Velocity-Flat-Unitree-Go1", "Walk a Unitree Go1 at the commanded velocity on flat ground."),
    "go1_rough": ("Mjlab-Velocity-Rough-Unitree-Go1", "Walk a Unitree Go1 at the commanded velocity on rough ground."),
    "g1_flat": ("Mjlab-Velocity-Flat-Unitree-G1", "Walk a Unitree G1 at the commanded velocity on flat ground."),
    "g1_rough": ("Mjlab-Velocity-Rough-Unitree-G1", "Walk a Unitree G1 at the commanded velocity on rough ground."),
    "lift_cube": ("Mjlab-Lift-Cube-Yam", "Lift a cube to a commanded place with an i2rt YAM arm."),
}

# mjlab leaves actions unbounded. They are offsets of joint targets in steps of about a quarter of what the motors can
# hold, and gaits need more than one of them; everything else is bounded by 1.
_WALKING, _ELSEWHERE = 3.0, 1.0


def entry(name: str, env_id: str, description: str) -> TaskEntry:
    """The task `name` that runs mjlab's `env_id`."""
    bound = _WALKING if "-Velocity-" in env_id else _ELSEWHERE

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.mjlab import make_mjlab

        refuse_cameras(name, options)
        return make_mjlab(env_id, options.num_envs, device=options.device, task=name, action_bound=bound)

    return TaskEntry(name, make, description, backends=("mjlab",), requires="mjlab")


def register() -> None:
    """Register every task without importing mjlab."""
    for task, (env_id, description) in TASKS.items():
        register_entry(entry(f"mjlab/{task}", env_id, description))
