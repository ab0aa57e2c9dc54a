"""Construction of locomotion simulators, imported on use."""

from __future__ import annotations

from dataclasses import replace

import mujoco

from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy_tasks.locomotion import robots
from robopolicy_tasks.locomotion.base import GymnasiumRobot

_ROBOTS: dict[str, type[GymnasiumRobot]] = {
    "Ant-v5": robots.Ant,
    "HalfCheetah-v5": robots.HalfCheetah,
    "Hopper-v5": robots.Hopper,
    "Humanoid-v5": robots.Humanoid,
    "InvertedPendulum-v5": robots.InvertedPendulum,
    "Swimmer-v5": robots.Swimmer,
    "Walker2d-v5": robots.Walker2d,
}


def make_locomotion(name: str, env_id: str, options: SimOptions) -> VectorSim:
    """Build task `name`, gymnasium's `env_id`, on the backend of `options`."""
    if options.backend in ("envpool", "gymnasium") and (options.cameras or options.point_clouds):
        raise UserError(f"Backend '{options.backend}' renders no camera observations; use backend 'mujoco'.")
    task = _ROBOTS[env_id](name)
    if options.backend == "gymnasium":
        from robopolicy.sim.backends.gymnasium import GymnasiumSim

        return _mirrored(GymnasiumSim(env_id, options.num_envs, task=name), task)
    if options.backend == "envpool":
        from robopolicy.sim.backends.envpool import EnvPoolSim

        sim = EnvPoolSim(env_id, options.num_envs, threads=options.threads, task=name, control_dt=task.dt)
        return _mirrored(sim, task)
    from robopolicy.sim.backends.mujoco.backend import make_mujoco

    if options.backend == "warp" and task.model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        task.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON  # MuJoCo Warp has no PGS, which the humanoid sets
    return make_mujoco(task, options)


def _mirrored(sim: VectorSim, task: GymnasiumRobot) -> VectorSim:
    """Set the symmetry of the native task, which has the same observations and actions."""
    sim.spec = replace(sim.spec, mirror=task.mirror)
    return sim
