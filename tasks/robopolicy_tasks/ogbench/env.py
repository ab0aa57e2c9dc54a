"""OGBench environments: its single tasks, and the data-collection mode with one random target per episode.

Single tasks are the official environments, unchanged. In data-collection mode the datasets of OGBench omit the target,
which offline goal-conditioned methods relabel; here `goal` is an observation, so that plain imitation and reinforcement
learning have a well-posed task.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import gymnasium
import mujoco
import numpy as np
import ogbench  # noqa: F401  registers its environments
import torch
from numpy.typing import NDArray
from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle
from torch import Tensor

from robopolicy.errors import unknown_name
from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import Expert, SimOptions
from robopolicy.sim.vector_env import legacy_numpy_seed

MAX_STEPS = 200
_ORACLES = {"cube": CubePlanOracle, "button": ButtonPlanOracle, "drawer": DrawerPlanOracle, "window": WindowPlanOracle}
_TARGET = "privileged/target_"


class PackageEnv(gymnasium.Wrapper):
    """Environment of the package whose model is compiled once, with its control rate, and whose renderer is freed."""

    def __init__(self, task: str, **settings: Any) -> None:
        with compiled_once():
            super().__init__(gymnasium.make(task, disable_env_checker=True, **settings))
            self.unwrapped.reset()  # the first reset compiles the model
        base_env: Any = self.unwrapped
        if hasattr(base_env, "_control_timestep"):  # mazes declare `dt`
            self.metadata = {**self.metadata, "render_fps": round(1 / base_env._control_timestep)}

    def mujoco_objects(self) -> tuple[Any, Any]:
        """Return model and data of MuJoCo, which manipulation and mazes name differently."""
        base_env: Any = self.unwrapped
        prefix = "_" if hasattr(base_env, "_model") else ""
        return getattr(base_env, prefix + "model"), getattr(base_env, prefix + "data")

    def close(self) -> None:
        """Free the renderer, which OGBench frees only at interpreter exit."""
        base_env: Any = self.unwrapped
        if getattr(base_env, "_renderer", None) is not None:
            base_env._renderer.close()
            base_env._renderer = None
        super().close()


class SingleTaskEnv(PackageEnv):
    """Official single-task environment, e.g. `scene-singletask-task1-v0`, whose episodes depend only on their seed.

    The reward of a step belongs to the state before it: the number of satisfied sub-goals minus their number, or, if
    `sparse`, -1 until all are satisfied. A step from a state with all satisfied ends the episode.
    """

    def __init__(self, task: str, *, sparse: bool) -> None:
        super().__init__(task)
        self._sparse = sparse

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Sample an initial state."""
        with seeded_reset(self.unwrapped, seed):
            return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action."""
        obs, reward, terminated, truncated, info = super().step(action)
        reward = float(reward)
        if self._sparse and reward < 0:
            reward = -1.0
        return obs, reward, bool(terminated), truncated, info


class GoalTaskEnv(PackageEnv):
    """Official goal-conditioned environment with one of its tasks per episode, and observations `state` and `goal`.

    `goal` is the representation of OGBench's `oraclerep` datasets: positions of cubes, drawer and window, and states of
    buttons. The reward is 1 at the end, when the goal is reached.
    """

    def __init__(self, task: str) -> None:
        super().__init__(task, use_oracle_rep=True)
        self._goal = self.reset(seed=0)[0]["goal"]
        space = gymnasium.spaces.Box(-np.inf, np.inf, self._goal.shape, np.float32)
        self.observation_space = gymnasium.spaces.Dict({"state": self.env.observation_space, "goal": space})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Sample a task and an initial state."""
        with seeded_reset(self.unwrapped, seed):
            obs, info = super().reset(seed=seed, options=options)
        self._goal = np.asarray(info["goal"], np.float32)
        return {"state": obs, "goal": self._goal}, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action."""
        obs, reward, terminated, truncated, info = super().step(action)
        return {"state": obs, "goal": self._goal}, float(reward), bool(terminated), truncated, info


class OGBenchEnv(PackageEnv):
    """Environment with observations `state` and `goal`; reward 1 and end when the target is reached.

    `goal` is one-hot kind (cube, button, drawer, window), block and button indices one-hot, then the target numbers.
    """

    def __init__(self, task: str) -> None:
        super().__init__(task, max_episode_steps=MAX_STEPS, terminate_at_goal=True, mode="data_collection")
        self.state: Any = None  # last observation of OGBench
        self.info: dict[str, Any] = {}  # last info, for the oracle
        base_env: Any = self.unwrapped
        self._counts = {"block": getattr(base_env, "_num_cubes", 0), "button": getattr(base_env, "_num_buttons", 0)}
        self.reset(seed=0)
        space: Any = self.env.observation_space
        goal = gymnasium.spaces.Box(-np.inf, np.inf, self._goal().shape, np.float32)
        self.observation_space = gymnasium.spaces.Dict({"state": space, "goal": goal})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Sample a scene and a target."""
        with numpy_seed(seed):
            self.state, self.info = super().reset(seed=seed, options=options)
        return {"state": self.state, "goal": self._goal()}, self.info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action."""
        self.state, reward, terminated, truncated, self.info = super().step(action)
        return {"state": self.state, "goal": self._goal()}, float(reward), bool(terminated), truncated, self.info

    def _goal(self) -> NDArray[np.float32]:
        kind = np.array([self.info[_TARGET + "task"] == name for name in _ORACLES])
        indices = [np.arange(n) == self.info[f"{_TARGET}{part}"] for part, n in self._counts.items() if n]
        numbers = [
            np.atleast_1d(value)
            for name, value in sorted(self.info.items())
            if name.startswith(_TARGET) and name.endswith(("_pos", "_yaw", "_state"))
        ]
        return np.concatenate([kind, *indices, *numbers]).astype(np.float32)


class OGBenchOracle:
    """Planning oracles of the package without noise; each episode follows a plan made at its start."""

    def __init__(self) -> None:
        self._plans: dict[int, Any] = {}  # oracle of each row

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, 5)`."""
        assert isinstance(sim, GymnasiumSim)
        actions: list[NDArray[np.float64]] = []
        fresh, seeds = (sim.episode_step == 0).tolist(), sim.episode_seed.tolist()
        for row, env in enumerate(sim.envs):
            assert isinstance(env, OGBenchEnv)
            if fresh[row]:
                oracle: Any = _ORACLES[str(env.info[_TARGET + "task"])]
                with numpy_seed(seeds[row]):
                    self._plans[row] = oracle(env=env, noise=0.0)
                    self._plans[row].reset(env.state, env.info)
            actions.append(self._plans[row].select_action(env.state, env.info))
        return torch.from_numpy(np.stack(actions).astype(np.float32)).clamp(-1, 1)


_compiled: dict[str, mujoco.MjModel] = {}  # by their text, which identifies assets by content


@contextmanager
def compiled_once() -> Iterator[None]:
    """Cache compiled models, as each environment of OGBench compiles the same two models."""
    compile_model = mujoco.MjModel.from_xml_string

    def copied(xml: str, assets: dict[str, bytes] | None = None) -> mujoco.MjModel:
        if xml not in _compiled:
            _compiled[xml] = compile_model(xml, assets)
        return copy.copy(_compiled[xml])

    with patch.object(mujoco.MjModel, "from_xml_string", copied):
        yield


@contextmanager
def numpy_seed(seed: int | None) -> Iterator[None]:
    """Seed the global generator of numpy, which the oracles use, and restore its state afterwards."""
    state = np.random.get_state()
    np.random.seed(None if seed is None else legacy_numpy_seed(seed))
    try:
        yield
    finally:
        np.random.set_state(state)


@contextmanager
def seeded_reset(base_env: Any, seed: int | None) -> Iterator[None]:
    """Seed the choice of a task, and the random steps of the package at the goal, which it draws unseeded."""
    space = base_env.action_space
    space.seed(seed)
    with numpy_seed(seed), patch.object(type(base_env), "action_space", space, create=True):
        yield


def make_env(task: str, options: SimOptions) -> PackageEnv:
    """Make one environment of `task`, e.g. "scene-singletask-task1-v0", "scene-oraclerep-v0" or "cube-single-v0"."""
    parts = task.split("-")
    if "singletask" in parts:
        return SingleTaskEnv(task, sparse=options.reward == "sparse")
    if options.reward != "sparse":
        raise unknown_name("reward", options.reward, ("sparse",), f"of task ogbench/{task}")
    if "oraclerep" in parts:
        return GoalTaskEnv(task.replace("-oraclerep", ""))
    return OGBenchEnv(task)


def make_expert(task: str) -> Expert:
    """Make the oracle, which plans by the target."""
    return OGBenchOracle()
