"""Tasks of optional packages that run on the gymnasium backend, one module `tasks.<family>.env` each.

Such a module offers `make_env(task, options) -> gymnasium.Env` and `make_expert(task) -> Expert`, and may import its
package freely: it is imported when the task is made, not when it is registered.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from importlib import import_module
from types import ModuleType

from robopolicy.errors import UserError, unknown_name
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.registry import Expert, SimOptions, TaskEntry, register


def register_package_task(
    family: str,
    task: str,
    description: str,
    rewards: tuple[str, ...],
    cameras: tuple[str, ...] = (),
    module_name: str = "",
) -> None:
    """Register `family/task` with what it offers; the extra to install is called like the family, without underscores.

    `module_name` is what that extra brings, where it is called otherwise.
    """
    name, extra = f"{family}/{task}", family.replace("_", "")  # old releases of pip know no extra with an underscore

    def module() -> ModuleType:
        with suppress(UserError):  # simulation needs no GL; where there is one, MuJoCo wants to know it when imported
            gl_backend()
        try:
            return import_module(f"tasks.{family}.env")
        except ImportError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"Task {name} needs pip install 'robopolicy[{extra}]' ({reason}).") from error

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.gymnasium import GymnasiumSim

        if options.cameras and not cameras:
            raise UserError(f"Task {name} has state observations only; leave the cameras out.")
        if options.point_clouds:
            raise UserError(f"Task {name} has no point clouds; leave them out.")
        for camera in options.cameras:
            if camera not in cameras:
                raise unknown_name("camera", camera, cameras, f"of task {name}")
        if options.reward not in rewards:
            raise unknown_name("reward", options.reward, rewards, f"of task {name}")
        return GymnasiumSim(partial(module().make_env, task, options), options.num_envs, task=name)

    def make_expert() -> Expert:
        return module().make_expert(task)

    register(
        TaskEntry(name, make, description, make_expert, backends=("gymnasium",), requires=extra, module=module_name)
    )
