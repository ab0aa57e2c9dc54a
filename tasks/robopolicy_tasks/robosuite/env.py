"""One robosuite task as a gymnasium environment whose episodes depend only on their seed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from robopolicy.errors import unknown_environment
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.registry import SimOptions

logging.disable(logging.WARNING)  # the import warns of missing optional packages
try:
    import robosuite
    from robosuite.controllers.parts import controller
    from robosuite.utils import binding_utils
finally:
    logging.disable(logging.NOTSET)
logging.getLogger("robosuite_logs").setLevel(logging.ERROR)

ROBOT = "Panda"
ARMS = ("IIWA", "Jaco", "Kinova3", "Panda", "Sawyer", "UR5e", "XArm7")
TASKS = tuple(name for name in robosuite.ALL_ENVIRONMENTS if not name.startswith("TwoArm"))
MAX_STEPS = 500
CONTROL_HZ = 20
OBSERVATION_KEYS = ("robot0_proprio-state", "object-state")  # summaries of arm and objects by robosuite


def _follow_mujoco() -> None:
    """Patch robosuite 1.5 for MuJoCo 3.10, whose `mj_fullM` takes the data instead of `qM`."""
    setattr(binding_utils.MjData, "qM", property(lambda data: data._data))  # noqa: B010  created at run time
    full: Any = lambda model, matrix, data: mujoco.mj_fullM(model, data, matrix)  # noqa: E731
    controller.mujoco = SimpleNamespace(mj_fullM=full)


if not hasattr(mujoco.MjData, "qM"):
    _follow_mujoco()


class RobosuiteEnv(gymnasium.Env[Any, Any]):
    """Environment with observations `robot` and `object`.

    With sparse rewards, success gives 1 and ends the episode; shaped rewards come from robosuite until the time
    limit.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as gymnasium declares it

    def __init__(self, task: str, reward: str) -> None:
        name, _, robot = task.partition("-")
        if name not in TASKS or (robot or ROBOT) not in ARMS:
            raise unknown_environment("robosuite", task, [*TASKS, *(f"{each}-{arm}" for each in TASKS for arm in ARMS)])
        self._shaped = reward == "shaped"
        self._env: Any = robosuite.make(
            name,
            robots=robot or ROBOT,
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            control_freq=CONTROL_HZ,
            horizon=MAX_STEPS,
            ignore_done=True,  # the time limit is set below
            reward_shaping=self._shaped,
            hard_reset=False,
            seed=0,
        )
        low, high = self._env.action_spec
        self.action_space = spaces.Box(low, high, low.shape, np.float64)
        sizes = {key: value.shape for key, value in self._observe(self._env.reset()).items()}
        self.observation_space = spaces.Dict({key: spaces.Box(-np.inf, np.inf, size) for key, size in sizes.items()})
        self.control_dt = 1 / CONTROL_HZ
        controllers = self._env.robots[0].composite_controller.part_controllers
        self.action_type = str(getattr(controllers["right"], "input_type", ""))  # absolute | delta
        self.spec = EnvSpec(f"robosuite/{task}", max_episode_steps=MAX_STEPS)
        self._renderer: Renderer | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Sample robot and object poses by `seed`."""
        if seed is not None:  # in place, as the samplers of the scene share the generator
            self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        return self._observe(self._env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action."""
        observation, reward, _, _ = self._env.step(action)
        success = bool(self._env._check_success())
        value = float(reward) if self._shaped else float(success)
        return self._observe(observation), value, success and not self._shaped, False, {"success": success}

    def render(self) -> Any:
        """Frame `(height, width, 3)` from the front, without collision shapes."""
        model, data = self.mujoco_objects()
        if self._renderer is None:
            self._renderer = Renderer(model, 480, 640, hidden=(0,))
        self._renderer.data.qpos[:] = data.qpos
        mujoco.mj_forward(model, self._renderer.data)
        return self._renderer.frame("frontview").copy()

    def mujoco_objects(self) -> tuple[Any, Any]:
        """Return model and data of MuJoCo."""
        return self._env.sim.model._model, self._env.sim.data._data

    def close(self) -> None:
        """Free the renderer and the scene."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._env.close()

    @staticmethod
    def _observe(observation: dict[str, Any]) -> dict[str, Any]:
        return {
            key.removesuffix("-state").replace("robot0_proprio", "robot"): observation[key] for key in OBSERVATION_KEYS
        }


def make_env(task: str, options: SimOptions) -> RobosuiteEnv:
    """Make one environment of `task`, e.g. "Lift" or "Lift-Sawyer"."""
    return RobosuiteEnv(task, options.reward)
