"""Tasks of other libraries by their own ids, without individual registration.

`gymnasium/<id>`, `gymnasium_robotics/<id>` and `envpool/<id>` run on the CPU, `mjlab/<id>` and `isaaclab/<id>` on
`options.device`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, TaskEntry, TaskFamily, register_family
from robopolicy.spec import IMAGE_PREFIX

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

# Actions of mjlab and Isaac Lab are unbounded. In their walking tasks an action is an offset of joint targets, scaled
# so that gaits need more than 1; all other actions are bounded by 1.
_WALKING, _ELSEWHERE = 3.0, 1.0
ROBOTICS = "gymnasium_robotics"


def _gymnasium_entry(env_id: str) -> TaskEntry:
    name = f"gymnasium/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.gymnasium import GymnasiumSim

        return _with_its_views(GymnasiumSim(env_id, options.num_envs, task=name), options)

    return TaskEntry(name, make, f"Gymnasium's {env_id}.", backends=("gymnasium",))


def _robotics_entry(env_id: str) -> TaskEntry:
    name = f"gymnasium_robotics/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.gymnasium import GymnasiumSim

        if find_spec(ROBOTICS) is None:
            raise UserError(f"Task {name} needs pip install 'robopolicy[gymnasiumrobotics]'.")
        return _with_its_views(GymnasiumSim(f"gymnasium_robotics:{env_id}", options.num_envs, task=name), options)

    description = f"Gymnasium-Robotics' {env_id}."
    return TaskEntry(name, make, description, backends=("gymnasium",), requires="gymnasiumrobotics", module=ROBOTICS)


def _envpool_entry(env_id: str) -> TaskEntry:
    name = f"envpool/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.envpool import EnvPoolSim

        # Meta-World hides the goal by default.
        extra = {"partially_observable": False} if env_id.startswith("MetaWorld/") else {}
        sim = EnvPoolSim(env_id, options.num_envs, threads=options.threads, task=name, options=extra)
        return _with_its_views(sim, options)

    return TaskEntry(name, make, f"EnvPool's {env_id}.", backends=("envpool",), requires="envpool")


def mjlab_entry(env_id: str, name: str = "", description: str = "") -> TaskEntry:
    """The task that runs mjlab's `env_id`; `robopolicy_tasks.mjlab` gives some of them short names."""
    name = name or f"mjlab/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.mjlab import make_mjlab

        bound = _action_bound(env_id)
        sim = make_mjlab(env_id, options.num_envs, device=options.device, task=name, action_bound=bound)
        return _with_its_views(sim, options)

    return TaskEntry(name, make, description or f"mjlab's {env_id}.", backends=("mjlab",), requires="mjlab")


def _isaaclab_entry(env_id: str) -> TaskEntry:
    name = f"isaaclab/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.isaaclab import make_isaaclab

        bound = _action_bound(env_id)
        sim = make_isaaclab(env_id, options.num_envs, device=options.device, task=name, action_bound=bound)
        return _with_its_views(sim, options)

    return TaskEntry(name, make, f"Isaac Lab's {env_id}.", backends=("isaaclab",), requires="isaaclab")


def _action_bound(env_id: str) -> float:
    return _WALKING if "-Velocity-" in env_id else _ELSEWHERE


def _with_its_views(sim: VectorSim, options: SimOptions) -> VectorSim:
    """The simulator with its own observations, including its images."""
    from robopolicy.nets.encoder import CLOUD_PREFIX

    asked = [IMAGE_PREFIX + camera for camera in options.cameras]
    asked += [CLOUD_PREFIX + camera for camera in options.point_clouds]
    if not set(asked) <= set(sim.spec.observation):
        sim.close()
        raise UserError(f"Task {sim.spec.task} has fixed observations and cannot add cameras; leave them out.")
    return sim


def register() -> None:
    """Register the families without importing them."""
    for prefix, make_entry, extra in (
        ("gymnasium", _gymnasium_entry, ""),
        (ROBOTICS, _robotics_entry, "gymnasiumrobotics"),
        ("envpool", _envpool_entry, "envpool"),
        ("mjlab", mjlab_entry, "mjlab"),
        ("isaaclab", _isaaclab_entry, "isaaclab"),
    ):
        description = f"Any task of {prefix} by its own id."
        register_family(prefix, TaskFamily(make_entry, description, requires=extra, module=prefix if extra else ""))
