"""Our simulators as Stable-Baselines3 `VecEnv`, without a process or a Python loop per environment in physics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from robopolicy.interop.gymnasium import Obs, action_space, next_seed, observation_space, row_of, to_numpy
from robopolicy.sim.contract import VectorSim


class SimVecEnv(VecEnv):
    """A simulator as SB3 `VecEnv`.

    `infos` carry `terminal_observation` and `TimeLimit.truncated` (truncated and not terminated), so that SB3
    bootstraps as our contract says, and `is_success` at the end of an episode where the task defines success.
    """

    def __init__(self, sim: VectorSim) -> None:
        self.sim = sim
        self.render_mode = None
        self._actions = torch.zeros(sim.num_envs, sim.spec.action_dim)
        super().__init__(sim.num_envs, observation_space(sim.spec), action_space(sim.spec))

    def reset(self) -> Obs:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start all episodes: those of `seed`, or the next ones."""
        seeds = [seed for seed in self._seeds if seed is not None]
        self._reset_seeds()
        self._reset_options()
        return to_numpy(self.sim.reset(seeds if len(seeds) == self.num_envs else next_seed(self.sim)))

    def step_async(self, actions: NDArray[np.float32]) -> None:
        """Remember actions `(N, A)` for `step_wait`."""
        self._actions = torch.as_tensor(np.asarray(actions, np.float32))

    def step_wait(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> tuple[Obs, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Apply the remembered actions."""
        step = self.sim.step(self._actions)
        done = step.done.cpu().numpy()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            final = to_numpy(step.final_obs)
            for row in np.flatnonzero(done).tolist():
                infos[row]["terminal_observation"] = row_of(final, row)
                infos[row]["TimeLimit.truncated"] = bool(step.truncated[row] & ~step.terminated[row])
                if "success" in step.info:
                    infos[row]["is_success"] = bool(step.info["success"][row])
        return to_numpy(step.obs), step.reward.cpu().numpy().copy(), done, infos

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """Frames `(height, width, 3)` of every environment."""
        return list(self.sim.render(envs=self.num_envs).permute(0, 2, 3, 1).numpy())

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Attribute of the simulator, once per environment; all rows share it."""
        if attr_name == "render_mode":
            return [self.render_mode for _ in self._get_indices(indices)]
        return [getattr(self.sim, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the simulator, shared by all rows."""
        setattr(self.sim, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of the simulator once and hand the result to every row."""
        result = getattr(self.sim, method_name)(*method_args, **method_kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: Any = None
    ) -> list[bool]:
        """No row is wrapped."""
        return [False for _ in self._get_indices(indices)]
