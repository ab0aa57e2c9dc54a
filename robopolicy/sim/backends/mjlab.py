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

    Args:
        environment: mjlab's name.
        options: `num_envs` and `device`: `cuda`, `cuda:0`, ... or `cpu`.
        task: Name to report; the id by default.
        action_bound: Actions, which mjlab leaves unbounded, are clipped to `[-action_bound, action_bound]`; None is
            the default of the environment.
    """
    config = mjlab_config(environment, options.num_envs)
    bound = default_action_bound(environment) if action_bound is None else action_bound
    with building(options.device):
        from mjlab.envs import ManagerBasedRlEnv

        env = ManagerBasedRlEnv(config, device=options.device)
        return IsaacStyleSim(env, task=task or environment, action_bound=bound)


def mjlab_config(env_id: str, num_envs: int) -> Any:
    """Configuration of mjlab's `env_id`, with last observations and resets by `IsaacStyleSim`.

    Raises:
        UserError: mjlab is missing, has no such environment, or the environment needs a file that mjlab does not
        include.
    """
    with suppress(UserError):  # MuJoCo reads the GL library on import; simulation needs none
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
    config.seed = 0  # of what is drawn once, such as terrain: the same in every run
    config.auto_reset = False
    return config
