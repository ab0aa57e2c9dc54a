"""Building velocity tasks; imported only when one is made."""

from __future__ import annotations

from robopolicy.sim.contract import VectorSim
from robopolicy.sim.mujoco.backend import MujocoSim
from robopolicy.sim.registry import SimOptions
from tasks.velocity.go1 import Go1
from tasks.velocity.randomization import NOMINAL, TRAINING

_RANGES = {"velocity/go1": NOMINAL, "velocity/go1_randomized": TRAINING}


def make_velocity(name: str, options: SimOptions) -> VectorSim:
    """Build task `name`."""
    return MujocoSim(
        Go1(name, options.reward, _RANGES[name]),
        options.num_envs,
        engine="exact" if options.backend == "mujoco-exact" else "auto",
        threads=options.threads,
        cameras=options.cameras,
        image_size=options.image_size,
        point_clouds=options.point_clouds,
        points=options.points,
    )
