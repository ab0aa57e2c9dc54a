"""EnvPool environments (Gymnasium v5, dm_control, Meta-World, MuJoCo Playground, ...) under the vector-sim contract.

EnvPool resets in the next step and fixes its random numbers when a pool is made. This backend resets an ended episode
in the same step, so `final_obs` is the true last observation. `reset(seed)` makes a new pool whose environment i starts
from `seed + i`, but later episodes continue the random stream, so single episodes cannot be repeated
(`spec.seeded_episodes` is False). A terminal state in the last allowed step is reported as truncation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError, unknown_environment
from robopolicy.sim.backends import BACKENDS
from robopolicy.sim.contract import Observation, SimSpec, Step
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.spaces import ObservationMap, action_bounds
from robopolicy.sim.vector_env import Arrays, NumpyVectorEnv, copied, core_count, fill, tensors

_SEEDS = 2**31  # number of distinct seeds in EnvPool
_DEFAULT_RATE = 20  # Hz; EnvPool does not report the control rate of most tasks


class EnvPoolSim(NumpyVectorEnv):
    """N environments of one EnvPool id."""

    def __init__(
        self,
        env_id: str,  # e.g. `HalfCheetah-v5`, `WalkerWalk-v1` or `MetaWorld/Push-v3`
        num_envs: int,
        *,
        threads: int = 0,  # of the pool; 0 is one per core
        task: str = "",  # name to report; the id by default
        control_dt: float = 0.0,  # seconds between two actions; 0: reported by EnvPool, else 1/20
        options: dict[str, Any] | None = None,  # of EnvPool's `make`, e.g. `{"max_episode_steps": 200}`
    ) -> None:
        self._envpool = _import_envpool()
        known = self._envpool.list_all_envs()
        if env_id not in known:
            raise unknown_environment("EnvPool", env_id, known)
        self._id, self._options = env_id, dict(options or {})
        self._threads = min(threads or core_count(), num_envs)
        config = self._envpool.make_spec(env_id, **self._options)
        action_space = config.gymnasium_action_space
        self._map = ObservationMap(config.gymnasium_observation_space)
        self._shape, self._dtype = action_space.shape, action_space.dtype
        low, high = action_bounds(action_space, task or env_id)
        spec = SimSpec(
            task=task or env_id,
            observation=self._map.specs,
            action_low=low,
            action_high=high,
            control_dt=control_dt or float(getattr(config.config, "ctrl_dt", 1 / _DEFAULT_RATE)),
            max_episode_steps=int(config.config.max_episode_steps),
            seeded_episodes=BACKENDS["envpool"].repeatable,
        )
        self._pool: Any = None
        super().__init__(spec, num_envs)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Make a new pool; environment i starts from `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        rows = np.arange(self.num_envs)
        seeds = self._seeds.take(rows)
        self._pool = self._envpool.make(
            self._id,
            env_type="gymnasium",
            num_envs=self.num_envs,
            num_threads=self._threads,
            seed=[seed % _SEEDS for seed in seeds],
            **self._options,
        )
        self._obs = self._map.empty(self.num_envs)
        self._start(rows, self._obs)
        return tensors(self._obs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; rows where `active` `(N,)` is False do not move."""
        executed = self._clipped(action)
        rows = np.arange(self.num_envs) if active is None else np.flatnonzero(active.detach().cpu().numpy())
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated, success, diverged = np.zeros((4, self.num_envs), bool)
        has_success = False
        final = self._obs
        if rows.size:
            command = executed[rows].reshape(len(rows), *self._shape).astype(self._dtype)
            observation, rewards, terms, truncs, extra = self._pool.step(command, rows.astype(np.int32))
            moved = extra["env_id"]
            reward[moved], terminated[moved], truncated[moved] = rewards, terms, truncs
            final = copied(self._obs)
            fill(final, moved, self._map.batch(observation))
            if "success" in extra:
                has_success, success[moved] = True, np.asarray(extra["success"]) > 0
            self._steps[moved] += 1
            moving = np.zeros(self.num_envs, bool)
            moving[moved] = True
            diverged = self._end_diverged(moving, final, reward, terminated, success)
        ended = np.flatnonzero(terminated | truncated)
        self._obs = final
        if ended.size:
            self._obs = copied(final)
            self._seeds.take(ended)
            self._start(ended, self._obs)
        info = {"diverged": diverged} | ({"success": success} if has_success else {})
        return self._result(reward, terminated, truncated, final, tensors(info))

    def close(self) -> None:
        """Stop the pool; safe to call twice."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _start(self, rows: NDArray[np.intp], obs: Arrays) -> None:
        """Start the next episode of each of `rows` and write its first observation into `obs`."""
        observation, extra = self._pool.reset(rows.astype(np.int32))
        fill(obs, extra["env_id"], self._map.batch(observation))
        self._steps[rows] = 0


def make_envpool(environment: str, options: SimOptions, *, task: str = "") -> EnvPoolSim:
    """Simulate an EnvPool environment; `task` is the name to report, its id by default."""
    # Meta-World hides the goal by default.
    extra = {"partially_observable": False} if environment.startswith("MetaWorld/") else {}
    return EnvPoolSim(environment, options.num_envs, threads=options.threads, task=task, options=extra)


def _import_envpool() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise UserError("EnvPool is not installed; run: pip install 'robopolicy[envpool]'.") from error
    return envpool
