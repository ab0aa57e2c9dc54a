"""Environments of mjlab: MuJoCo-Warp on an NVIDIA GPU or, slowly, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError, unknown_environment, unknown_name
from robopolicy.sim.backends.isaac_style import IsaacStyleSim, building, default_action_bound
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.physics_state import MujocoState
from robopolicy.sim.registry import SimOptions


def make_mjlab(
    environment: str, options: SimOptions, *, task: str = "", action_bound: float | None = None
) -> IsaacStyleSim:
    """Build environments of one mjlab id, for example `Mjlab-Velocity-Flat-Unitree-Go1`.

    `options` give `num_envs`, `device` (`cuda`, `cuda:0`, ... or `cpu`), `cameras` and `exact_final_obs`; `task` is the
    name to report (default: the id). mjlab leaves actions unbounded; they are clipped to
    `[-action_bound, action_bound]` (default: by task).
    """
    config = mjlab_config(environment, options.num_envs)
    bound = default_action_bound(environment) if action_bound is None else action_bound
    return simulate_mjlab(config, options, task=task or environment, action_bound=bound)


def simulate_mjlab(config: Any, options: SimOptions, *, task: str, action_bound: float = 1.0) -> IsaacStyleSim:
    """Build environments of a configuration of mjlab, for example an edited result of `mjlab_config`."""
    observe_cameras(config, options.cameras, options.image_size, task)
    with building(options.device) as device:
        from mjlab.envs import ManagerBasedRlEnv

        env = ManagerBasedRlEnv(config, device=device)
        exact = options.exact_final_obs
        return IsaacStyleSim(env, task=task, action_bound=action_bound, exact_final_obs=exact)


def mjlab_config(env_id: str, num_envs: int) -> Any:
    """Configuration of `env_id`; a `UserError` if it is missing."""
    with suppress(UserError):  # MuJoCo reads the GL library on import; simulation does not need it
        gl_backend()
    try:
        import mjlab.tasks  # noqa: F401 - registers the environments
        from mjlab.tasks.registry import list_tasks, load_env_cfg
    except ImportError as error:
        raise UserError(f"mjlab cannot be imported ({error}); run: pip install 'robopolicy[mjlab]'.") from error
    if env_id not in list_tasks():
        raise unknown_environment("mjlab", env_id, list_tasks())
    config: Any = load_env_cfg(env_id)
    if getattr(config.commands.get("motion"), "motion_file", None) == "":
        raise UserError(
            f"mjlab's {env_id} needs a motion file that mjlab does not include; build it in Python (IsaacStyleSim)."
        )
    config.scene.num_envs = num_envs
    config.seed = 0  # for values drawn once, such as terrain: equal in every run
    return config


def observe_cameras(config: Any, cameras: Sequence[str], size: int, task: str) -> None:
    """Add images of `cameras`, named without their entity, to the observations of `config`, `size` pixels square.

    Colour images that the environment observes already become uint8, which is a quarter of mjlab's floats.
    """
    from mjlab.managers import ObservationGroupCfg, ObservationTermCfg
    from mjlab.sensor import CameraSensorCfg
    from mjlab.tasks.manipulation.mdp import camera_rgb

    for group in config.observations.values():
        for term in group.terms.values() if len(group.terms) == 1 else ():
            if term.func is camera_rgb:
                term.func = _pixels
    models = {name: entity.spec_fn() for name, entity in config.scene.entities.items()}
    known = {camera.name: f"{name}/{camera.name}" for name, model in models.items() for camera in model.cameras}
    sensors = [sensor for sensor in config.scene.sensors if isinstance(sensor, CameraSensorCfg)]
    settings = ("use_textures", "use_shadows", "enabled_geom_groups")  # mjlab requires equal ones of all cameras
    shared = {key: getattr(sensor, key) for sensor in sensors[:1] for key in settings}
    for camera in cameras:
        if camera in config.observations:
            continue
        if camera not in known:
            raise unknown_name("camera", camera, known, f"of task {task}")
        sensor = CameraSensorCfg(
            name=f"observed_{camera}", camera_name=known[camera], width=size, height=size, **shared
        )
        config.scene.sensors = (*config.scene.sensors, sensor)
        config.observations[camera] = ObservationGroupCfg(
            {camera: ObservationTermCfg(_pixels, params={"sensor_name": sensor.name})}
        )


def _pixels(env: Any, sensor_name: str) -> Tensor:
    """Colour images `(N, height, width, 3)` uint8 of a camera sensor."""
    return env.scene[sensor_name].data.rgb


def mujoco_state(env: Any, row: int) -> MujocoState:
    """Positions of environment `row` of an mjlab environment, downloaded."""
    data = env.sim.data
    fields = (getattr(data, name)[row].cpu().numpy().astype(np.float64) for name in ("qpos", "mocap_pos", "mocap_quat"))
    return MujocoState(env.sim.mj_model, *fields)


class MjlabRenderer:
    """Offscreen renderer of an environment of mjlab, from the camera of its viewer or a camera of its model."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._renderers: dict[tuple[int, int, int], Any] = {}  # by row, width and height

    def frames(self, camera: str | None, width: int, height: int, envs: int) -> Tensor:
        """Frames `(envs, 3, height, width)` uint8 of the first `envs` rows."""
        env = self._env
        known = [env.sim.mj_model.camera(index).name for index in range(env.sim.mj_model.ncam)]
        if camera is not None and camera not in known:
            raise unknown_name("camera", camera, known)
        frames = []
        for row in range(min(envs, env.num_envs)):
            renderer = self._renderer(row, width, height)
            renderer.update(env.sim.data, debug_vis_callback=env.update_visualizers, camera=camera)
            frames.append(torch.from_numpy(renderer.render().copy()).permute(2, 0, 1))
        return torch.stack(frames)

    def close(self) -> None:
        """Free the contexts."""
        for renderer in self._renderers.values():
            renderer.close()

    def _renderer(self, row: int, width: int, height: int) -> Any:
        """Renderer of one row, which mjlab fixes at its first frame."""
        if (row, width, height) not in self._renderers:
            _choose_context()
            from mjlab.viewer.offscreen_renderer import OffscreenRenderer

            env = self._env
            viewer = replace(env.cfg.viewer, env_idx=row, max_extra_envs=0, width=width, height=height)
            model = env.sim.mj_model, viewer, env.scene, env.sim.model, env.sim.expanded_fields
            renderer = OffscreenRenderer(*model)
            renderer.initialize()
            self._renderers[row, width, height] = renderer
        return self._renderers[row, width, height]


def _choose_context() -> None:
    """Let MuJoCo's renderer draw with `gl_backend`; MuJoCo itself reads MUJOCO_GL on import only."""
    name = gl_backend()
    from mujoco.rendering.classic import gl_context

    gl_context.GLContext = import_module(f"mujoco.{name}").GLContext
