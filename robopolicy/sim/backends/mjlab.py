"""Environments of mjlab: MuJoCo-Warp on an NVIDIA GPU or, slowly, on the CPU."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from robopolicy.errors import UserError, unknown_environment
from robopolicy.sim.backends.isaac_style import IsaacStyleSim, building, default_action_bound
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.registry import SimOptions


def make_mjlab(
    environment: str, options: SimOptions, *, task: str = "", action_bound: float | None = None
) -> IsaacStyleSim:
    """Build environments of one mjlab id, for example `Mjlab-Velocity-Flat-Unitree-Go1`.

    `options` give `num_envs` and `device` (`cuda`, `cuda:0`, ... or `cpu`), `task` is the name to report (default: the
    id). mjlab leaves actions unbounded; they are clipped to `[-action_bound, action_bound]` (default: by task).
    """
    config = mjlab_config(environment, options.num_envs)
    bound = default_action_bound(environment) if action_bound is None else action_bound
    with building(options.device):
        from mjlab.envs import ManagerBasedRlEnv

        env = ManagerBasedRlEnv(config, device=options.device)
        return IsaacStyleSim(env, task=task or environment, action_bound=bound)


def mjlab_config(env_id: str, num_envs: int) -> Any:
    """Configuration of `env_id`, with last observations and resets by `IsaacStyleSim`; `UserError` if it is missing."""
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
    config.auto_reset = False
    return config
