"""One task of the DeepMind Control Suite as a gymnasium environment whose episodes depend only on their seed."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from dm_control import suite
from dm_control.rl.control import PhysicsError
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from robopolicy.errors import unknown_environment
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import legacy_numpy_seed

TASKS = {f"{domain}-{task}": (domain, task) for domain, task in suite.ALL_TASKS}


class ControlSuiteEnv(gymnasium.Env[Any, Any]):
    """Environment with all observations in one vector `state`, and rewards in [0, 1]."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as gymnasium declares it

    def __init__(self, task: str) -> None:
        if task not in TASKS:
            raise unknown_environment("dm_control", task, TASKS)
        self._env: Any = suite.load(*TASKS[task], task_kwargs={"random": 0})
        action = self._env.action_spec()
        size = sum(int(np.prod(entry.shape)) for entry in self._env.observation_spec().values())
        self.action_space = spaces.Box(action.minimum, action.maximum, action.shape, np.float64)
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.control_dt = float(self._env.control_timestep())
        limit = self._env._step_limit
        self.spec = EnvSpec(f"dm_control/{task}", max_episode_steps=int(limit) if np.isfinite(limit) else None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the episode of `seed`."""
        if seed is not None:
            self._env.task.random.seed(legacy_numpy_seed(seed))
        return _vector(self._env.reset().observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action; an end with discount 0 is a termination, any other end a truncation.

        If the physics diverges, observations are NaN, as `GymnasiumSim` expects.
        """
        try:
            step = self._env.step(action)
        except PhysicsError:
            return np.full(self.observation_space.shape or (), np.nan), 0.0, True, False, {}
        failed = step.last() and step.discount == 0
        return _vector(step.observation), float(step.reward), failed, step.last() and not failed, {}

    def render(self) -> Any:
        """Frame `(height, width, 3)` of the first camera."""
        return self._env.physics.render(480, 640, camera_id=0)

    def mujoco_objects(self) -> tuple[Any, Any]:
        """Return model and data of MuJoCo."""
        return self._env.physics.model.ptr, self._env.physics.data.ptr

    def close(self) -> None:
        """Free the renderer."""
        self._env.close()


def make_env(task: str, options: SimOptions) -> ControlSuiteEnv:
    """Make one environment of `task`, e.g. "walker-walk"."""
    return ControlSuiteEnv(task)


def _vector(observation: dict[str, Any]) -> NDArray[np.float64]:
    return np.concatenate([np.ravel(value) for value in observation.values()])
