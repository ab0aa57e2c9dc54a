"""Registration of tasks of optional packages on the gymnasium backend, one module `robopolicy_tasks.<family>.env` each.

Such a module defines `make_env(task, options) -> gymnasium.Env` and `make_expert(task) -> Expert`. It is imported when
the task is made, not when it is registered, so it may import its package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from robopolicy.errors import UserError, unknown_name
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.registry import Expert, SimOptions, TaskEntry, TaskFamily, register, register_family

if TYPE_CHECKING:
    import gymnasium

    from robopolicy.sim.contract import VectorSim


def register_package_task(
    family: str,
    task: str,
    description: str,
    rewards: tuple[str, ...],
    cameras: tuple[str, ...] = (),
    module_name: str = "",
    prefix: str = "",
    install: str = "",
    model_cameras: bool = False,
) -> None:
    """Register `family/task`, or `prefix/task`, with a scripted expert, whose episodes end at success.

    The extra is named like the family, without underscores; `module_name` is its module, if the name differs. With
    `model_cameras`, every camera of its MuJoCo model can be observed; `cameras` are those that the environment renders.
    `install` replaces the command of the extra.
    """
    module, options = module_name, {"prefix": prefix, "model_cameras": model_cameras}
    register(replace(_entry(family, task, description, rewards, cameras, module, install, **options), success="end"))


def register_package_family(
    family: str,
    description: str,
    rewards: tuple[str, ...],
    module_name: str = "",
    install: str = "",
    success: str = "any",
    model_cameras: bool = False,
) -> None:
    """Register every `family/<id>` of a package, without experts.

    `install` replaces the command of the extra; `success` is that field of `TaskEntry`; `model_cameras` as for a task.
    """

    def make_entry(task: str) -> TaskEntry:
        module = module_name or family
        entry = _entry(family, task, description, rewards, (), module, install, model_cameras=model_cameras)
        return replace(entry, make_expert=None, success=success)

    register_family(family, TaskFamily(make_entry, description, requires=_extra(family), module=module_name or family))


def _entry(
    family: str,
    task: str,
    description: str,
    rewards: tuple[str, ...],
    cameras: tuple[str, ...],
    module_name: str,
    install: str = "",
    prefix: str = "",
    model_cameras: bool = False,
) -> TaskEntry:
    name, extra = f"{prefix or family}/{task}", _extra(family)

    def module() -> ModuleType:
        with suppress(UserError):  # MuJoCo reads the GL library on import; simulation does not need it
            gl_backend()
        try:
            return import_module(f"robopolicy_tasks.{family}.env")
        except ImportError as error:
            reason = str(error).splitlines()[0]
            command = install or f"pip install 'robopolicy[{extra}]'"
            raise UserError(f"Task {name} needs {command} ({reason}).") from error

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.gymnasium import GymnasiumSim, mujoco_objects

        make_env: Callable[[], gymnasium.Env[Any, Any]] = partial(module().make_env, task, options)
        if options.cameras and model_cameras:
            from robopolicy.sim.camera_env import CameraEnv, SharedRenderer

            plain, renderer = make_env, SharedRenderer(options.image_size)
            make_env = lambda: CameraEnv(plain(), mujoco_objects, options.cameras, renderer)  # noqa: E731
        elif options.cameras and not cameras:
            raise UserError(f"Task {name} has only state observations; remove the cameras.")
        if options.point_clouds:
            raise UserError(f"Task {name} has no point clouds; remove them.")
        for camera in options.cameras:
            if camera not in cameras and not model_cameras:
                raise unknown_name("camera", camera, cameras, f"of task {name}")
        if options.reward not in rewards:
            raise unknown_name("reward", options.reward, rewards, f"of task {name}")
        return GymnasiumSim(make_env, options.num_envs, task=name)

    def make_expert() -> Expert:
        return module().make_expert(task)

    return TaskEntry(name, make, description, make_expert, backends=("gymnasium",), requires=extra, module=module_name)


def _extra(family: str) -> str:
    return family.replace("_", "")  # old releases of pip reject underscores in extras
