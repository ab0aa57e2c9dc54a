"""Vector simulator of mjlab and Isaac Lab environments, which share one interface on a GPU.

Supports mjlab's `ManagerBasedRlEnv` and Isaac Lab's `ManagerBasedRLEnv` and `DirectRLEnv` (2.3 and 3) through their
attributes, without importing either. Rewards, flags and observations stay on the device of the environment; `step`
waits for the device once, for the indices of the rows to reset, as both libraries do.

* **Last observations.** Both libraries reset ended rows inside their step, which hides the last observation. With
  `exact_final_obs`, mjlab's rows are reset after the step instead, at the price of computing all observations twice,
  and Isaac Lab 3 returns the last observations (`cfg.compute_final_obs = True`). Otherwise, and in Isaac Lab 2.3,
  `spec.final_obs_exact` is False and `final_obs` is the previous observation.
* **Chunks.** No row can be skipped in a step (`spec.supports_masked_step` is False). A step with a mask resets no row,
  so that its last observations are exact; `reset_rows` resets them once per chunk.
* **Actions.** Infinite bounds become `action_bound`, since both libraries leave most actions unbounded.
* **Diverged physics.** A row with a non-finite observation or reward, or a NaN action, terminates with reward 0.
* **Seeds.** Episodes share one random stream, so single episodes cannot be repeated (`spec.seeded_episodes` is False).
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from robopolicy.device import usable_device
from robopolicy.errors import UserError
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.sim.chunk import where_rows
from robopolicy.sim.contract import LOG_PREFIX, Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.physics_state import PhysicsState
from robopolicy.sim.vector_env import SeedCounter

_SEEDS = 2**32  # range of numpy seeds


class IsaacStyleSim(VectorSim):
    """The environments of one mjlab or Isaac Lab object `env`, without its wrappers; `task` is the name to report.

    Actions that the environment leaves unbounded are clipped to `[-action_bound, action_bound]`. Every observation
    group becomes a key, the terms of a group that is not concatenated become `<group>.<term>`, and colour images
    `image.<key>`. Entries of the environment's log become `log.<name>` in `info`; one number for all episodes that end
    in a step is given to every row. `info["success"]` is the termination term of that name, if it exists.
    """

    def __init__(self, env: Any, *, task: str, action_bound: float = 1.0, exact_final_obs: bool = True) -> None:
        self.env: Any = env.unwrapped
        if hasattr(self.env, "possible_agents"):
            raise UserError(f"Task {task} has several agents; robot policies control one agent.")
        self.num_envs = int(self.env.num_envs)
        self.device = torch.empty(0, device=str(self.env.device)).device  # "cuda" is cuda:0 in every tensor
        self._stream = _RandomStream(self.device)
        self._is_mjlab = hasattr(self.env.cfg, "auto_reset")
        self._resets_rows = exact_final_obs and self._is_mjlab  # this class resets ended rows, not the library
        if self._is_mjlab:
            self.env.cfg.auto_reset = True  # `_without_resets` prevents it
        self._renderer: Any = None
        terms = getattr(getattr(self.env, "termination_manager", None), "active_terms", ())
        self._has_success = "success" in terms
        self._low, self._high = _action_bounds(self.env.single_action_space, action_bound, task, self.device)
        first = self.reset(0)
        self.spec = SimSpec(
            task=task,
            observation={key: TensorSpec(tuple(value.shape[1:]), value.dtype) for key, value in first.items()},
            action_low=self._low.cpu(),
            action_high=self._high.cpu(),
            control_dt=float(self.env.step_dt),
            max_episode_steps=int(self.env.max_episode_length),
            seeded_episodes=False,
            supports_masked_step=False,
            final_obs_exact=self._resets_rows or getattr(self.env.cfg, "compute_final_obs", False),
        )
        self._zero_is_valid = bool((self._low <= 0).all() and (self._high >= 0).all())

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment from one random stream, seeded by `seed` (the first of several)."""
        counter = SeedCounter(self.num_envs)
        counter.reset(seed)
        names = counter.take(np.arange(self.num_envs))
        self.episode_seed = torch.tensor(names, device=self.device)
        self._last_seed = torch.tensor(max(names), device=self.device)
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        with self._stream, redirect_stdout(io.StringIO()):  # mjlab prints every seed
            obs, _ = self.env.reset(seed=names[0] % _SEEDS)
            self._obs = _flat(obs)
        return dict(self._obs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; with `active`, ended rows wait for `reset_rows`."""
        expected = (self.num_envs, len(self._low))
        if tuple(action.shape) != expected:
            raise UserError(f"Expected actions of shape {expected}, got {tuple(action.shape)}.")
        action = action.detach().to(self.device, torch.float32)
        clipped = action.clamp(self._low, self._high)  # keeps NaN
        executed = clipped.nan_to_num()
        if not self._zero_is_valid:
            executed = executed.clamp(self._low, self._high)
        resets_later = active is not None or self._resets_rows
        with self._stream, self._without_resets() if resets_later else nullcontext():
            result = self.env.step(executed)
            current, extras = _flat(result[0]), result[4]
            reward = result[1].to(torch.float32, copy=True).reshape(-1)  # mjlab writes into the same storage every step
            terminated, truncated = (flag.to(torch.bool, copy=True).reshape(-1) for flag in result[2:4])
            last = extras.pop("final_obs", None)  # Isaac Lab keeps the entry in steps without episode ends
            diverged = _broken_rows(current, clipped, reward)
            if resets_later:
                final = current
            elif last is None:
                final = where_rows(terminated | truncated, self._obs, current)
            else:
                final = where_rows(terminated | truncated, _flat(last), current)
                diverged |= _broken_rows(final)
        info = {"diverged": diverged, **self._logged(extras)}
        if self._has_success:
            info["success"] = self.env.termination_manager.get_term("success") & ~diverged
        terminated |= diverged
        if active is not None:
            final = where_rows(diverged, self._obs, final)
            self._obs = final
            self.episode_step = self.episode_step + active
            reward = torch.where(active & ~diverged, reward, 0.0)
            return Step(dict(final), reward, terminated & active, truncated & active, final, info)
        done = terminated | truncated
        restart = done if self._resets_rows else diverged  # a diverged row that the library has reset is reset again
        rows = restart.nonzero().flatten()
        obs = current
        if len(rows):
            with self._stream:
                obs = where_rows(restart, self._restart(rows), current)
            final = where_rows(diverged, self._obs, final)
            reward = torch.where(diverged, 0.0, reward)
            info |= self._logged(extras)
        self._obs = obs
        self.episode_step = torch.where(done, 0, self.episode_step + 1)
        if len(rows) or not self._resets_rows:
            self._next_seeds(done)
        return Step(dict(obs), reward, terminated, truncated, dict(final), info)

    def reset_rows(self, ended: Tensor) -> tuple[Observation, dict[str, Tensor]]:
        """Start the next episodes of `ended` `(N,)`; return the observations of all rows and the entries `log.*`."""
        rows = ended.nonzero().flatten()
        if not len(rows):
            return dict(self._obs), {}
        with self._stream:
            self._obs = where_rows(ended, self._restart(rows), self._obs)
        self.episode_step = torch.where(ended, 0, self.episode_step)
        self._next_seeds(ended)
        return dict(self._obs), self._logged(self.env.extras)

    def _next_seeds(self, ended: Tensor) -> None:
        number = ended.cumsum(0)
        self.episode_seed = torch.where(ended, self._last_seed + number, self.episode_seed)
        self._last_seed = self._last_seed + number[-1]

    @contextmanager
    def _without_resets(self) -> Iterator[None]:
        """Keep the library from resetting ended rows in its step; their observations are then the last ones."""
        exact = getattr(self.env.cfg, "compute_final_obs", None)
        self.env._reset_idx = lambda env_ids: None
        if exact:
            self.env.cfg.compute_final_obs = False
        try:
            yield
        finally:
            del self.env._reset_idx
            if exact:
                self.env.cfg.compute_final_obs = True

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames `(envs, 3, height, width)` uint8 of the first `envs` environments."""
        if self._is_mjlab and self._renderer is None:
            from robopolicy.sim.backends.mjlab import MjlabRenderer

            self._renderer = MjlabRenderer(self.env)
        if self._renderer is not None:
            return self._renderer.frames(camera, width, height, envs)
        from robopolicy.sim.backends.isaaclab import viewport_frames

        return viewport_frames(self.env, camera, width, height, envs)

    def physics_state(self, env: int = 0) -> PhysicsState | None:
        """Return the positions of the bodies of environment `env`."""
        if self._is_mjlab:
            from robopolicy.sim.backends.mjlab import mujoco_state

            return mujoco_state(self.env, env)
        from robopolicy.sim.backends.isaaclab import body_positions

        return body_positions(self.env, env)

    def close(self) -> None:
        """Free the environment; safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        if self.env is not None:
            self.env.close()
            self.env = None

    def _restart(self, rows: Tensor) -> Observation:
        """Start the next episodes of `rows` `(K,)` and return the observations of all rows."""
        if self._is_mjlab:
            return _flat(self.env.reset(env_ids=rows)[0])
        # Isaac Lab can reset single rows only through the calls of its own `step`: its `reset` takes no rows in
        # direct environments, and adds to the observation history of the other rows in manager-based environments.
        self.env._reset_idx(rows)
        self.env.scene.write_data_to_sim()
        self.env.sim.forward()
        manager = getattr(self.env, "observation_manager", None)
        return _flat(self.env._get_observations() if manager is None else manager.compute())

    def _logged(self, extras: Mapping[str, Any]) -> dict[str, Tensor]:
        """Entries of `extras["log"]` with one number per row or one number for all rows."""
        found: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in (extras.get("log") or {}).items():
            if isinstance(value, int | float):
                numbers[name] = float(value)
            elif isinstance(value, Tensor) and value.shape in ((), (1,)):
                tensors[name] = value.reshape(1).to(self.device)
            elif isinstance(value, Tensor) and value.shape == (self.num_envs,):
                found[LOG_PREFIX + name] = value.to(self.device, torch.float32, copy=True)
        parts = list(tensors.values())
        if numbers:
            parts.append(torch.tensor(list(numbers.values())).to(self.device, non_blocking=True))
        if parts:  # copied together, since a kernel for each of dozens of entries would take long
            rows = torch.cat(parts).float().unsqueeze(1).expand(-1, self.num_envs)
            found |= dict(zip((LOG_PREFIX + name for name in (*tensors, *numbers)), rows, strict=True))
        return found


@contextmanager
def building(device: str) -> Iterator[str]:
    """Suppress the output of a library and preserve the global random generators while it builds an environment.

    Yields the name of the device that `device` stands for.
    """
    with suppress(ImportError, AttributeError):  # Warp prints every kernel that it loads
        import warp

        warp.config.log_level = warp.LOG_WARNING
    usable = usable_device(device)
    with _RandomStream(usable), redirect_stdout(io.StringIO()):
        yield str(usable)


class _RandomStream:
    """Separate state of the global random generators for one environment.

    Both libraries draw from these generators and seed them on construction and reset. Training uses them as well: it
    must not repeat its numbers after every evaluation, and an episode must not depend on other draws. The generators
    belong to one environment at a time, since an evaluation may run during a rollout (`sim.overlap`).
    """

    _lock = threading.RLock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device) if device.type != "cpu" else None
        self._inner: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()
        # Numpy's generator is swapped, because copying its state in every step takes longer than all other copies. The
        # swap loses the second of a pair of normal numbers of the legacy interface.
        self._numpy: Any = np.random.MT19937()
        state = mtrand.get_bit_generator().state
        if state["bit_generator"] == "MT19937":
            self._numpy.state = state

    def __enter__(self) -> None:
        self._lock.acquire()
        self._outer = self._states()
        self._swap_numpy()
        if self._inner is not None:
            self._set(self._inner)

    def __exit__(self, *error: object) -> None:
        self._inner = self._states()
        self._swap_numpy()
        self._set(self._outer)
        self._lock.release()

    def _swap_numpy(self) -> None:
        own, self._numpy = self._numpy, mtrand.get_bit_generator()
        mtrand.set_bit_generator(own)

    def _states(self) -> tuple[Any, ...]:
        accelerator = None if self._module is None else self._module.get_rng_state(self._device)
        return random.getstate(), torch.get_rng_state(), accelerator

    def _set(self, states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if self._module is not None:
            self._module.set_rng_state(states[2], self._device)


def default_action_bound(environment: str) -> float:
    """Bound of unbounded actions: 3 for walking tasks, whose scaled joint offsets exceed 1 in a gait; else 1."""
    return 3.0 if "-Velocity-" in environment else 1.0


def _action_bounds(space: Any, bound: float, task: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Finite bounds `(A,)` of a Box of gymnasium or mjlab; bounds of mjlab may be scalars."""
    if not hasattr(space, "low"):
        raise UserError(f"Task {task} has {type(space).__name__} actions; robot policies need a Box.")
    if not 0 < bound < float("inf"):
        raise UserError(f"The action bound must be a positive number, got {bound}.")
    limits: list[Tensor] = []
    for bounds, default in ((space.low, -bound), (space.high, bound)):
        limit = np.broadcast_to(np.asarray(bounds, np.float32), space.shape).reshape(-1)
        limits.append(torch.tensor(np.where(np.isfinite(limit), limit, default), dtype=torch.float32, device=device))
    return limits[0], limits[1]


def _flat(obs: Mapping[str, Any]) -> Observation:
    """Fresh tensors by flat keys: vectors float32, colour images uint8 with channels first."""
    flat: Observation = {}
    for key, value in _leaves(obs, ""):
        if value.dtype == torch.uint8 and value.dim() == 4 and 3 in (value.shape[1], value.shape[3]):
            image = value if value.shape[1] == 3 else value.permute(0, 3, 1, 2)
            flat[IMAGE_PREFIX + key] = image.contiguous().clone()
        else:
            entry = value.to(torch.float32, copy=True)
            flat[key] = entry if entry.dim() > 1 else entry.unsqueeze(1)
    return flat


def _leaves(obs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in obs.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _broken_rows(obs: Observation, *others: Tensor) -> Tensor:
    """Mask `(N,)` of rows with a NaN or infinite number in `obs` or in `others` `(N, ...)`."""
    numbers = [value.reshape(len(value), -1) for value in (*obs.values(), *others) if value.is_floating_point()]
    if not numbers:  # images only
        first = next(iter(obs.values()))
        return torch.zeros(len(first), dtype=torch.bool, device=first.device)
    # 0 * inf and 0 * NaN are NaN, and a sum propagates NaN.
    return (numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)).mul(0.0).sum(1) != 0.0
