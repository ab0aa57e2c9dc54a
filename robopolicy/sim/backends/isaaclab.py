"""Environments of Isaac Lab: version 3 on Newton (MuJoCo-Warp, GPU or CPU) or Isaac Sim, version 2.3 on Isaac Sim."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from robopolicy.errors import UserError, unknown_environment, unknown_name
from robopolicy.sim.backends.isaac_style import IsaacStyleSim, building, default_action_bound
from robopolicy.sim.physics_state import BodyPositions
from robopolicy.sim.registry import SimOptions


def make_isaaclab(
    environment: str, options: SimOptions, *, task: str = "", action_bound: float | None = None
) -> IsaacStyleSim:
    """Build environments of one Isaac Lab id, for example `Isaac-Ant`; a process can contain one set.

    `options` give `num_envs`, `device` (`cuda`, `cuda:0`, ... or `cpu`) and `exact_final_obs`, `task` is the name to
    report (default: the id). Isaac Lab leaves actions unbounded; they are clipped to `[-action_bound, action_bound]`
    (default: by task).
    """
    bound = default_action_bound(environment) if action_bound is None else action_bound
    with building(options.device) as device:
        config = isaaclab_config(environment, options.num_envs, device)
        if hasattr(config, "compute_final_obs"):
            config.compute_final_obs = options.exact_final_obs
        return IsaacStyleSim(gymnasium.make(environment, cfg=config), task=task or environment, action_bound=bound)


def isaaclab_config(env_id: str, num_envs: int, device: str) -> Any:
    """Configuration of `env_id`; raise a `UserError` if it cannot be simulated."""
    try:
        if find_spec("isaaclab") and not find_spec("isaaclab_newton"):  # 2.3 can be imported only inside Isaac Sim
            import_module("isaaclab.app").AppLauncher(headless=True, device=device)
        context = import_module("isaaclab.sim").SimulationContext
        parse_env_cfg = import_module("isaaclab_tasks.utils").parse_env_cfg  # also registers the environments
    except ImportError as error:
        raise UserError(_missing(error)) from error
    known = [name for name, spec in gymnasium.registry.items() if "env_cfg_entry_point" in spec.kwargs]
    if env_id not in known:
        raise unknown_environment("Isaac Lab", env_id, known)
    if context.instance() is not None:
        raise UserError(
            "Isaac Lab supports one set of environments per process, and one is open; train with "
            "evaluation.episodes=0 and evaluate afterwards (robopolicy eval)."
        )
    config: Any = parse_env_cfg(env_id, device=device, num_envs=num_envs)
    config.seed = 0  # for values drawn once, such as terrain: equal in every run
    return config


def viewport_frames(env: Any, camera: str | None, width: int, height: int, envs: int) -> Tensor:
    """Frames `(envs, 3, height, width)` uint8 of the first `envs` rows, from the camera of the viewport of `env`.

    Isaac Lab 3 draws with the visualizer in `cfg.sim.visualizer_cfgs`; without one, a UserError is raised.
    """
    drawing = [each for each in getattr(env.sim, "visualizers", ()) if hasattr(each, "render_rgb_array")]
    if not drawing:
        raise UserError("This environment of Isaac Lab draws no images; add a visualizer to cfg.sim.visualizer_cfgs.")
    if camera is not None:
        raise unknown_name("camera", camera, (), "of Isaac Lab's viewport")
    frames: list[Tensor] = []
    for origin in env.scene.env_origins[:envs].tolist():
        views = (env.cfg.viewer.eye, env.cfg.viewer.lookat)
        drawing[0].set_camera_view(*(tuple(a + b for a, b in zip(view, origin, strict=True)) for view in views))
        frames.append(torch.from_numpy(drawing[0].render_rgb_array().copy()).permute(2, 0, 1))
    return interpolate(torch.stack(frames).float(), (height, width), mode="area").round().to(torch.uint8)


def body_positions(env: Any, row: int) -> BodyPositions | None:
    """Positions of the bodies of all robots and rigid objects of environment `row`, relative to its origin."""
    names: list[str] = []
    positions: list[Tensor] = []
    for group in ("articulations", "rigid_objects"):
        for name, entity in getattr(env.scene, group, {}).items():
            names += [f"{name}/{body}" for body in entity.body_names]
            positions.append(torch.as_tensor(entity.data.body_pos_w)[row].cpu())
    if not positions:
        return None
    origin = torch.as_tensor(env.scene.env_origins)[row].cpu()
    return BodyPositions(tuple(names), (torch.cat(positions) - origin).double().numpy())


def _missing(error: ImportError) -> str:
    found = ".".join(map(str, sys.version_info[:2]))
    command = "pip install 'robopolicy[isaaclab]'"
    if found != "3.12":
        command += f" in a separate environment with Python 3.12 (this is {found})"
    return f"Isaac Lab cannot be imported ({error}); run: {command}."
