"""Vector simulator of any gymnasium environment, stepped in this process with one seed per episode."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import SimulatorFailed, UserError
from robopolicy.sim.camera_env import CameraEnv
from robopolicy.sim.contract import TERM_PREFIX, Observation, SimSpec, Step
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.physics_state import MujocoState
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.spaces import ObservationMap, action_bounds
from robopolicy.sim.vector_env import Arrays, NumpyVectorEnv, copied, fill, finite_rows, tensors

_DEFAULT_MAX_STEPS = 1000  # for environments that declare no time limit
_DEFAULT_RATE = 20  # Hz, for environments that declare neither `dt` nor a frame rate
_TERM = "reward_"  # prefix of the keys of gymnasium's `info` with reward terms, e.g. `reward_ctrl`


class GymnasiumSim(NumpyVectorEnv):
    """N copies of one gymnasium environment.

    `env` is a gymnasium id (`"module:Name-v0"` imports the module first) or a function that makes one environment;
    `task` is the name to report, by default the id. `info["success"]` is set if the environment reports `success` or
    `is_success`, and `info["reward.NAME"]` if it reports numbers `reward_NAME`, the terms of its reward.

    Raises:
        SimulatorFailed: In any call: the environment raised an exception, or its first observation is not finite.
    """

    def __init__(self, env: str | Callable[[], gymnasium.Env[Any, Any]], num_envs: int, *, task: str = "") -> None:
        if num_envs < 1:
            raise UserError(f"The number of environments must be at least 1, got {num_envs}.")
        make = _maker(env) if isinstance(env, str) else env
        try:
            self._envs = [make() for _ in range(num_envs)]
            first = self._envs[0]
            task = task or (env if isinstance(env, str) else type(first.unwrapped).__name__)
            if len({id(each.unwrapped) for each in self._envs}) < num_envs:
                raise UserError(
                    f"The factory of {task} returned the same environment twice; return a new one from every call."
                )
            self._map = ObservationMap(first.observation_space)
            space = first.action_space
            low, high = action_bounds(space, task)
            rate, longest = _control_dt(first), _time_limit(first)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise SimulatorFailed.because(task or str(env), "at its start", error) from error
        self._shape, self._dtype = space.shape or (), space.dtype
        action_type = getattr(first.unwrapped, "action_type", "")
        action_type = action_type if action_type in ("absolute", "delta") else ""
        spec = SimSpec(task, self._map.specs, low, high, rate, longest, action_type=action_type)
        super().__init__(spec, num_envs)
        # The spec's bounds are rounded to float32 and may exceed the bounds of the space, which some environments
        # check.
        box: Any = space
        self._low, self._high = (bound.reshape(-1).astype(np.float64) for bound in (box.low, box.high))
        self._terms: tuple[str, ...] = ()  # names of reward terms reported so far

    @property
    def envs(self) -> list[gymnasium.Env[Any, Any]]:
        """The environments without their cameras, for scripted experts that read their internal state."""
        return [env.env if isinstance(env, CameraEnv) else env for env in self._envs]

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        self._obs = self._map.empty(self.num_envs)
        self._start(np.arange(self.num_envs), self._obs)
        return tensors(self._obs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; rows where `active` `(N,)` is False do not move."""
        executed = self._clipped(action)
        moving = np.ones(self.num_envs, bool) if active is None else active.detach().cpu().numpy()
        final = copied(self._obs)
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated, success, auto_reset = np.zeros((4, self.num_envs), bool)
        has_success, terms = False, {name: np.zeros(self.num_envs, np.float32) for name in self._terms}
        for row in np.flatnonzero(moving).tolist():
            command = self._command(executed[row])
            with self._error_context(row, f"in step {self._steps[row] + 1}"):
                resets = _auto_resets(self._envs[row])
                observation, row_reward, terminated[row], truncated[row], info = self._envs[row].step(command)
                auto_reset[row] = _auto_resets(self._envs[row]) > resets
                reward[row] = _number(row_reward, "reward")
                fill(final, row, self._map.single(observation))
                reported = info.get("success", info.get("is_success"))
                if reported is not None:
                    has_success, success[row] = True, bool(_number(reported, "success"))
                for name, value in _reward_terms(info):
                    terms.setdefault(name, np.zeros(self.num_envs, np.float32))[row] = value
        self._steps += moving
        self._terms = tuple(terms)
        reward[auto_reset] = np.nan  # MuJoCo diverged and reset itself: the step is invalid
        diverged = self._end_diverged(moving, final, reward, terminated, success)
        truncated |= moving & (self._steps >= self.spec.max_episode_steps)
        ended = np.flatnonzero(terminated | truncated)
        self._obs = copied(final) if ended.size else final
        self._start(ended, self._obs)
        info = tensors(terms | {"diverged": diverged} | ({"success": success} if has_success else {}))
        return self._result(reward, terminated, truncated, final, info)

    def goal_reward(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """Rewards `(B,)` of goals `(B, G)` by the environment's `compute_reward`, which must accept rows."""
        compute = getattr(self._envs[0].unwrapped, "compute_reward", None)
        if compute is None or not {"achieved_goal", "desired_goal"} <= set(self.spec.observation):
            return super().goal_reward(achieved, desired)
        found = np.asarray(compute(achieved.cpu().numpy(), desired.cpu().numpy(), {}), np.float32)
        if found.shape != (len(achieved),):
            raise UserError(f"`compute_reward` of task {self.spec.task} must return one reward per row of goals.")
        return torch.from_numpy(found).to(achieved.device)

    def _command(self, action: NDArray[np.float64]) -> NDArray[Any]:
        """Action in the shape and type of the space, rounded for integer spaces."""
        is_integer = np.issubdtype(self._dtype, np.integer)
        return (np.rint(action) if is_integer else action).reshape(self._shape).astype(self._dtype)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames `(envs, 3, height, width)` uint8, scaled from the size that the environment renders."""
        if camera is not None:
            raise UserError(f"Task {self.spec.task} has a fixed view; remove the camera option.")
        if mujoco_objects(self._envs[0])[0] is not None:
            gl_backend()
        frames = [self._render_row(row) for row in range(min(envs, self.num_envs))]
        pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
        scaled = torch.nn.functional.interpolate(pixels.float(), (height, width), mode="area")
        return scaled.round().to(torch.uint8)

    def physics_state(self, env: int = 0) -> MujocoState | None:
        """Return the positions of an environment with a MuJoCo model; see `mujoco_objects`."""
        model, data = mujoco_objects(self._envs[env])
        return None if data is None else MujocoState.of(model, data)

    def _render_row(self, row: int) -> NDArray[np.uint8]:
        """Rendered frame `(height, width, 3)` of an environment; an alpha channel is dropped."""
        frame: Any = None
        with self._error_context(row, f"while rendering step {self._steps[row]}"), suppress(NotImplementedError):
            frame = self._envs[row].render()
        if frame is None:
            raise UserError(f"Task {self.spec.task} has no 'rgb_array' rendering.")
        shape = np.shape(frame)
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or len(shape) != 3 or shape[2] not in (3, 4):
            found = f"{type(frame).__name__} {shape or ''}".strip()
            raise UserError(
                f"Task {self.spec.task} must render uint8 (height, width, 3) but renders {found}; fix `render`."
            )
        return frame[..., :3]

    def close(self) -> None:
        """Close the environments; safe to call twice."""
        for env in self._envs:
            with suppress(Exception):  # errors on close must not lose the collected data
                env.close()

    def _start(self, rows: NDArray[np.intp], obs: Arrays) -> None:
        """Start the next episode of each of `rows` and write its first observation into `obs`."""
        for row, seed in zip(rows.tolist(), self._seeds.take(rows), strict=True):
            with self._error_context(row, "at the start"):
                observation, _ = self._envs[row].reset(seed=seed)
                first = self._map.single(observation)
                if not finite_rows(first, 1):
                    raise ValueError("the first observation is not finite")
                fill(obs, row, first)
        self._steps[rows] = 0

    @contextmanager
    def _error_context(self, row: int, doing: str) -> Iterator[None]:
        """Add task and episode to an exception."""
        try:
            yield
        except (Exception, SystemExit) as error:
            episode = f"{doing} of the episode with seed {self._seeds.current[row]}"
            raise SimulatorFailed.because(self.spec.task, episode, error) from error


def _reward_terms(info: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the key in `Step.info` and the value of every reward term in `info` of gymnasium."""
    for key, value in info.items():
        if key.startswith(_TERM) and isinstance(value, float | int | np.number):
            yield TERM_PREFIX + key.removeprefix(_TERM), float(value)


def _number(value: Any, name: str) -> float:
    """Convert a scalar or an array of one element."""
    if np.size(value) != 1:
        raise ValueError(f"{name} must be a single number, got shape {np.shape(value)}")
    return float(np.asarray(value).item())


def _auto_resets(env: gymnasium.Env[Any, Any]) -> int:
    """Number of resets in which MuJoCo recovered from divergence in this episode; 0 for other simulators.

    Observations after such a reset are finite.
    """
    data: Any = getattr(env.unwrapped, "data", None)
    mujoco: Any = sys.modules.get("mujoco")
    if mujoco is None or not isinstance(data, mujoco.MjData):
        return 0
    warning = mujoco.mjtWarning
    return sum(
        data.warning[kind].number for kind in (warning.mjWARN_BADQPOS, warning.mjWARN_BADQVEL, warning.mjWARN_BADQACC)
    )


def make_gymnasium(environment: str, options: SimOptions, *, task: str = "") -> GymnasiumSim:
    """Simulate a registered gymnasium environment; `task` is the name to report, its id by default."""
    return GymnasiumSim(environment, options.num_envs, task=task)


def _maker(name: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Function that makes `name`, with image rendering if the environment supports it."""
    try:
        probe = gymnasium.make(name)
        renders = "rgb_array" in probe.metadata.get("render_modes", [])
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise UserError(f"Cannot make the gymnasium environment '{name}': {' '.join(str(error).split())}") from error
    except (Exception, SystemExit) as error:
        raise SimulatorFailed.because(f"gymnasium/{name}", "at its start", error) from error
    with suppress(Exception):  # an error on close is harmless
        probe.close()

    def make() -> gymnasium.Env[Any, Any]:
        if renders:
            with suppress(TypeError):  # not every environment with rendering takes the argument
                return _without_shadows(gymnasium.make(name, render_mode="rgb_array"))
        return _without_shadows(gymnasium.make(name))

    return make


def mujoco_objects(env: gymnasium.Env[Any, Any]) -> tuple[Any, Any]:
    """`MjModel` and `MjData` of an environment, or None.

    They are the result of a method `mujoco_objects` of the environment or of a wrapper, or its `model` and `data`.
    """
    if env.has_wrapper_attr("mujoco_objects"):
        return env.get_wrapper_attr("mujoco_objects")()
    model, data = (getattr(env.unwrapped, name, None) for name in ("model", "data"))
    return (model, data) if hasattr(model, "light_castshadow") else (None, None)


def _without_shadows(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Disable shadows and multisampling, which make CPU rendering of MuJoCo 20 to 60 times slower."""
    model, _ = mujoco_objects(env)
    if model is not None:
        model.light_castshadow[:] = 0
        model.mat_reflectance[:] = 0
        model.vis.quality.offsamples = 0
    return env


def _control_dt(env: gymnasium.Env[Any, Any]) -> float:
    """Seconds between two actions as declared by the environment; 0 if it declares no positive number."""
    for dt in (getattr(env, "control_dt", None), *(getattr(env.unwrapped, key, None) for key in ("control_dt", "dt"))):
        if isinstance(dt, Real) and 0 < float(dt) < math.inf:
            return float(dt)
    rate = env.metadata.get("render_fps")
    return 1.0 / float(rate if isinstance(rate, Real) and 0 < float(rate) < math.inf else _DEFAULT_RATE)


def _time_limit(env: gymnasium.Env[Any, Any]) -> int:
    """Maximum episode length in control steps, from the registered id or the time-limit wrapper."""
    if env.spec is not None and env.spec.max_episode_steps:
        return env.spec.max_episode_steps
    limits: list[int] = []
    while isinstance(env, gymnasium.Wrapper):
        limits += [env._max_episode_steps] if isinstance(env, TimeLimit) else []
        env = env.env
    return min(limits, default=_DEFAULT_MAX_STEPS)
