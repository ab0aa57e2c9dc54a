"""Tasks of other libraries by their own ids, nothing to register one by one.

`gymnasium/<id>` and `envpool/<id>` run on the CPU, `mjlab/<id>` and `isaaclab/<id>` on `options.device`.
"""

from __future__ import annotations

from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry, register_family
from tasks import mjlab
from tasks.packages import refuse_cameras


def _gymnasium_entry(env_id: str) -> TaskEntry:
    name = f"gymnasium/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.gymnasium import GymnasiumSim

        refuse_cameras(name, options)
        return GymnasiumSim(env_id, options.num_envs, task=name)

    return TaskEntry(name, make, f"Gymnasium's {env_id}.", backends=("gymnasium",))


def _envpool_entry(env_id: str) -> TaskEntry:
    name = f"envpool/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.envpool import EnvPoolSim

        refuse_cameras(name, options)
        return EnvPoolSim(env_id, options.num_envs, threads=options.threads, task=name)

    return TaskEntry(name, make, f"EnvPool's {env_id}.", backends=("envpool",), requires="envpool")


def _mjlab_entry(env_id: str) -> TaskEntry:
    return mjlab.entry(f"mjlab/{env_id}", env_id, f"mjlab's {env_id}.")


def _isaaclab_entry(env_id: str) -> TaskEntry:
    name = f"isaaclab/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.isaaclab import make_isaaclab

        refuse_cameras(name, options)
        return make_isaaclab(env_id, options.num_envs, device=options.device, task=name)

    return TaskEntry(name, make, f"Isaac Lab's {env_id}.", backends=("isaaclab",), requires="isaaclab")


def register() -> None:
    """Register the families without importing them."""
    register_family("gymnasium", _gymnasium_entry)
    register_family("envpool", _envpool_entry)
    register_family("mjlab", _mjlab_entry)
    register_family("isaaclab", _isaaclab_entry)
