"""Our simulators as gymnasium environments: one (`SimEnv`) or a batch (`SimVectorEnv`, same-step autoreset).

Images become channels-last, as gymnasium expects; a simulator whose only observation is `state` gets a plain Box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, VectorSim
from robopolicy.spec import IMAGE_PREFIX

Obs = NDArray[Any] | dict[str, NDArray[Any]]


def observation_space(spec: SimSpec) -> spaces.Space[Any]:
    """Return the space of one observation: a Box for `state` alone, else a Dict."""
    boxes: dict[str, spaces.Space[Any]] = {}
    for key, entry in spec.observation.items():
        if key.startswith(IMAGE_PREFIX):
            boxes[key] = spaces.Box(0, 255, (*entry.shape[1:], entry.shape[0]), np.uint8)
        else:
            boxes[key] = spaces.Box(-np.inf, np.inf, entry.shape, np.float32)
    return boxes["state"] if set(boxes) == {"state"} else spaces.Dict(boxes)


def action_space(spec: SimSpec) -> spaces.Box:
    """Return the space of one action."""
    return spaces.Box(spec.action_low.numpy(), spec.action_high.numpy(), dtype=np.float32)


def to_numpy(obs: Observation) -> Obs:
    """Convert a batch of observations to the format of `observation_space`."""
    arrays = {
        key: (value.permute(0, 2, 3, 1) if key.startswith(IMAGE_PREFIX) else value).cpu().numpy().copy()
        for key, value in obs.items()
    }
    return arrays["state"] if set(arrays) == {"state"} else arrays


def row_of(obs: Obs, row: int) -> Obs:
    """Return the observation of one environment of a batch."""
    return {key: value[row] for key, value in obs.items()} if isinstance(obs, dict) else obs[row]


def next_seed(sim: VectorSim) -> int:
    """Return the first unused seed; resets without a seed use it, so that all episodes are reproducible."""
    return int(sim.episode_seed.max()) + 1


class SimEnv(gymnasium.Env[Any, Any]):
    """A simulator with one environment as `gymnasium.Env`."""

    def __init__(self, sim: VectorSim, render_mode: str | None = None) -> None:
        if sim.num_envs != 1:
            raise UserError(f"SimEnv needs a simulator with 1 environment, got {sim.num_envs}; use SimVectorEnv.")
        self.sim = sim
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / sim.spec.control_dt)}
        self.observation_space = observation_space(sim.spec)
        self.action_space = action_space(sim.spec)
        self._next: Obs | None = None  # first observation of the next episode, after an automatic reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Start the episode of `seed`, or the next one."""
        super().reset(seed=seed)
        obs, self._next = self._next, None
        if seed is not None or obs is None:
            obs = row_of(to_numpy(self.sim.reset(next_seed(self.sim) if seed is None else seed)), 0)
        return obs, {}

    def step(self, action: NDArray[np.float32]) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Apply one action `(A,)`."""
        step = self.sim.step(torch.as_tensor(np.asarray(action, np.float32))[None])
        if bool(step.done):
            self._next = row_of(to_numpy(step.obs), 0)
        info = {key: value[0].cpu().numpy()[()] for key, value in step.info.items()}
        obs = row_of(to_numpy(step.final_obs), 0)
        return obs, float(step.reward), bool(step.terminated), bool(step.truncated), info

    def render(self) -> NDArray[np.uint8] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Frame `(height, width, 3)` where `render_mode` is `rgb_array`."""
        return self.sim.render()[0].permute(1, 2, 0).numpy() if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()


class SimVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A simulator as `gymnasium.vector.VectorEnv` in `SAME_STEP` autoreset mode."""

    def __init__(self, sim: VectorSim) -> None:
        self.sim = sim
        self.num_envs = sim.num_envs
        self.metadata = {
            "render_modes": [],
            "render_fps": round(1 / sim.spec.control_dt),
            "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP,
        }
        self.single_observation_space = observation_space(sim.spec)
        self.single_action_space = action_space(sim.spec)
        self.observation_space = batch_space(self.single_observation_space, sim.num_envs)
        self.action_space = batch_space(self.single_action_space, sim.num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Start all episodes: `seed + i`, `seed[i]`, or the next ones."""
        fresh = next_seed(self.sim)
        if seed is None:
            seed = fresh
        elif not isinstance(seed, int):
            seed = [fresh + i if given is None else given for i, given in enumerate(seed)]
        return to_numpy(self.sim.reset(seed)), {}

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Obs, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Apply actions `(N, A)`; the last observations of ended episodes are in `infos["final_obs"]`."""
        step = self.sim.step(torch.as_tensor(np.asarray(actions, np.float32)))
        done = step.done.cpu().numpy()
        infos = _masked({key: value.cpu().numpy() for key, value in step.info.items()}, np.ones(self.num_envs, bool))
        if done.any():
            final = to_numpy(step.final_obs)
            rows = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(done):
                rows[row] = row_of(final, int(row))
            final_info = _masked({key: value.cpu().numpy() for key, value in step.info.items()}, done)
            infos |= _masked({"final_obs": rows, "final_info": final_info}, done)
        terminated, truncated = step.terminated.cpu().numpy().copy(), step.truncated.cpu().numpy().copy()
        return to_numpy(step.obs), step.reward.cpu().double().numpy(), terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Close the simulator."""
        self.sim.close()


def _masked(values: dict[str, Any], mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Add a mask `_k` of environments for every key `k`, as in gymnasium."""
    return {**values, **{f"_{key}": mask.copy() for key in values}}
