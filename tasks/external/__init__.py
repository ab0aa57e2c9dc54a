"""Tasks of other libraries by their own ids: `gymnasium/<id>` and `envpool/<id>`, nothing to register one by one."""

from __future__ import annotations

from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry, register_family


def _gymnasium_entry(env_id: str) -> TaskEntry:
    name = f"gymnasium/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.gymnasium import GymnasiumSim

        _refuse_cameras(name, options)
        return GymnasiumSim(env_id, options.num_envs, task=name)

    return TaskEntry(name, make, f"Gymnasium's {env_id}.", backends=("gymnasium",))


def _envpool_entry(env_id: str) -> TaskEntry:
    name = f"envpool/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.envpool import EnvPoolSim

        _refuse_cameras(name, options)
        return EnvPoolSim(env_id, options.num_envs, threads=options.threads, task=name)

    return TaskEntry(name, make, f"EnvPool's {env_id}.", backends=("envpool",), requires="envpool")


def _refuse_cameras(name: str, options: SimOptions) -> None:
    if options.cameras or options.point_clouds:
        raise UserError(f"Task {name} brings its own observations and cannot add cameras; leave them out.")


def register() -> None:
    """Register both families without importing them."""
    register_family("gymnasium", _gymnasium_entry)
    register_family("envpool", _envpool_entry)
