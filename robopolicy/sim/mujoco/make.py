"""From the options of the registry to a simulator of a `MujocoTask`; imported only when one is made."""

from __future__ import annotations

from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.mujoco.task import MujocoTask
from robopolicy.sim.registry import SimOptions


def make_mujoco(task: MujocoTask, options: SimOptions) -> VectorSim:
    """Simulate `task` on the backend that `options` ask for: `auto`, `mujoco`, `mujoco-exact` or `warp`."""
    if options.backend == "warp":
        if options.cameras or options.point_clouds:
            raise UserError("Backend 'warp' renders no camera observations; use backend 'mujoco'.")
        from robopolicy.sim.mujoco.warp import WarpSim

        return WarpSim(task, options.num_envs, device=options.device)
    from robopolicy.sim.mujoco.backend import MujocoSim

    return MujocoSim(
        task,
        options.num_envs,
        engine="exact" if options.backend == "mujoco-exact" else "auto",
        threads=options.threads,
        cameras=options.cameras,
        image_size=options.image_size,
        point_clouds=options.point_clouds,
        points=options.points,
    )
