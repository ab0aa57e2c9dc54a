"""Tasks of optional packages that run on the gymnasium backend, one module `robopolicy_tasks.<family>.env` each.

Such a module offers `make_env(task, options) -> gymnasium.Env` and `make_expert(task) -> Expert`, and may import its
package freely: it is imported when the task is made, not when it is registered.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from robopolicy.errors import UserError, unknown_name
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.registry import Expert, SimOptions, TaskEntry, TaskFamily, register, register_family

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim


def register_package_task(
    family: str,
    task: str,
    description: str,
    rewards: tuple[str, ...],
    cameras: tuple[str, ...] = (),
    module_name: str = "",
) -> None:
    """Register `family/task` with what it offers, a scripted expert among it.

    The extra to install is called like the family, without underscores; `module_name` is what it brings, where it is
    called otherwise.
    """
    register(_entry(family, task, description, rewards, cameras, module_name))


def register_package_family(
    family: str, description: str, rewards: tuple[str, ...], module_name: str = "", install: str = ""
) -> None:
    """Register every `family/<id>` of a package, without experts; `install` where no extra can say it."""

    def make_entry(task: str) -> TaskEntry:
        entry = _entry(family, task, description, rewards, (), module_name or family, install)
        return replace(entry, make_expert=None)

    register_family(family, TaskFamily(make_entry, description, requires=_extra(family), module=module_name or family))


def _entry(
    family: str,
    task: str,
    description: str,
    rewards: tuple[str, ...],
    cameras: tuple[str, ...],
    module_name: str,
    install: str = "",
) -> TaskEntry:
    name, extra = f"{family}/{task}", _extra(family)

    def module() -> ModuleType:
        with suppress(UserError):  # simulation needs no GL; where there is one, MuJoCo wants to know it when imported
            gl_backend()
        try:
            return import_module(f"robopolicy_tasks.{family}.env")
        except ImportError as error:
            reason = str(error).splitlines()[0]
            cure = install or f"pip install 'robopolicy[{extra}]'"
            raise UserError(f"Task {name} needs {cure} ({reason}).") from error

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.gymnasium import GymnasiumSim

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

    return TaskEntry(name, make, description, make_expert, backends=("gymnasium",), requires=extra, module=module_name)


def _extra(family: str) -> str:
    return family.replace("_", "")  # old releases of pip know no extra with an underscore
