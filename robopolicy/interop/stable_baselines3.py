"""Adapters for Stable-Baselines3: simulators as `VecEnv`, policies with `predict`, models as policies.

    mean, std = evaluate_policy(Predictor(policy), SimVecEnv(sim), n_eval_episodes=20)
    expert = PolicyExpert(wrap_model("hopper_td3", model))

`wrap_model` wraps any model of this process as a black box; `sb3_actor` converts MLP actors of PPO, A2C and SAC to our
policies, also from a saved zip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.interop.gymnasium import Obs, action_space, next_seed, observation_space, row_of, to_numpy
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.optional import missing
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.black_box import CallablePolicy
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.spaces import ObservationMap, action_bounds

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise missing("stable_baselines3", "sb3") from error


class SimVecEnv(VecEnv):
    """A simulator as SB3 `VecEnv`.

    `infos` carry `terminal_observation` and `TimeLimit.truncated` (truncated and not terminated), so that SB3
    bootstraps as our contract requires, and `is_success` at the end of an episode where the task defines success.
    """

    def __init__(self, sim: VectorSim) -> None:
        self.sim = sim
        self.render_mode = None
        self._actions = torch.zeros(sim.num_envs, sim.spec.action_dim)
        super().__init__(sim.num_envs, observation_space(sim.spec), action_space(sim.spec))

    def reset(self) -> Obs:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the episodes of `seed`, or the next ones."""
        seeds = [seed for seed in self._seeds if seed is not None]
        self._reset_seeds()
        self._reset_options()
        return to_numpy(self.sim.reset(seeds if len(seeds) == self.num_envs else next_seed(self.sim)))

    def step_async(self, actions: NDArray[np.float32]) -> None:
        """Store actions `(N, A)` for `step_wait`."""
        self._actions = torch.as_tensor(np.asarray(actions, np.float32))

    def step_wait(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> tuple[Obs, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Apply the stored actions."""
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
        """Call a method of the simulator once and return the result for every row."""
        result = getattr(self.sim, method_name)(*method_args, **method_kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: Any = None
    ) -> list[bool]:
        """No row is wrapped."""
        return [False for _ in self._get_indices(indices)]


State = tuple[NDArray[Any], ...]
"""State of `Predictor` between calls: index of the next action `(N,)`, chunk `(N, H, A)`, histories by key."""


class Predictor:
    """Policy with the `predict` method of SB3, e.g. for `evaluate_policy`.

    The `state` that `predict` returns and takes contains the current chunk and histories;
    without it every call computes a new chunk. Noise is a function of `seed`, the row and the number of the call.
    """

    def __init__(self, policy: Policy, action_space: spaces.Box | None = None, *, seed: int = 0) -> None:
        """Wrap `policy`; with `action_space`, actions are clipped to it, as SB3's own are."""
        self.policy = policy.eval()
        self.action_space = action_space
        self.seed = seed
        self._calls = 0

    def predict(
        self,
        observation: NDArray[Any] | Mapping[str, NDArray[Any]],
        state: State | None = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[np.float32], State]:
        """Return actions `(N, A)` for observations `(N, ...)`, or `(A,)` for one, and the state for the next call."""
        obs, single = self._read(observation)
        spec, rows = self.policy.spec, len(next(iter(obs.values())))
        repeated = {key: value.unsqueeze(1).repeat_interleave(spec.obs_horizon, 1) for key, value in obs.items()}
        if state is None:
            place, chunk = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, spec.horizon, spec.action_dim)
            history = repeated
        else:
            fresh = torch.zeros(rows, dtype=torch.bool) if episode_start is None else torch.as_tensor(episode_start)
            place, chunk, *older = (torch.tensor(array) for array in state)
            place = torch.where(fresh, 0, place)
            history = {key: _pushed(past, obs[key], repeated[key], fresh) for key, past in zip(obs, older, strict=True)}
        due = (place == 0).nonzero().flatten()
        if len(due):
            streams = PerRowGenerator([self.seed + row for row in due.tolist()], [self._calls] * len(due))
            with torch.inference_mode():
                inputs = {key: value[due] for key, value in history.items()}
                chunk[due] = self.policy.act(inputs, deterministic=deterministic, generator=streams).cpu()
        self._calls += 1
        action = chunk[torch.arange(rows), place].numpy()
        if self.action_space is not None:
            action = np.clip(action, self.action_space.low, self.action_space.high)
        place = (place + 1) % spec.action_horizon
        kept = (place.numpy(), chunk.numpy(), *(value.cpu().numpy() for value in history.values()))
        return action[0] if single else action, kept

    def _read(self, observation: NDArray[Any] | Mapping[str, NDArray[Any]]) -> tuple[Observation, bool]:
        """Return observations by key with a batch dimension, and whether the input had none."""
        shapes = self.policy.spec.observation
        if not isinstance(observation, Mapping):
            if len(shapes) != 1:
                raise UserError(f"The policy needs the observations {', '.join(sorted(shapes))}, found a single array.")
            observation = {next(iter(shapes)): observation}
        device = next((parameter.device for parameter in self.policy.parameters()), torch.device("cpu"))
        obs: Observation = {}
        single: set[bool] = set()
        for key, shape in shapes.items():
            if key not in observation:
                found = ", ".join(sorted(observation))
                raise UserError(f"The policy needs the observation '{key}', found {found}; choose its own environment.")
            value = torch.as_tensor(np.asarray(observation[key]))
            if key.startswith(IMAGE_PREFIX) and value.shape[-3:] == (*shape[1:], shape[0]):
                value = value.movedim(-1, -3)
            single.add(value.dim() == len(shape))
            value = value.unsqueeze(0) if value.dim() == len(shape) else value
            if tuple(value.shape[1:]) != tuple(shape):
                raise UserError(f"The policy expects '{key}' of shape {tuple(shape)}, found {tuple(value.shape[1:])}.")
            obs[key] = value.to(device, torch.uint8 if key.startswith(IMAGE_PREFIX) else torch.float32)
        return obs, single == {True}


def wrap_model(name: str, model: Any) -> CallablePolicy:
    """Wrap a feedforward model with continuous actions as a deterministic policy with one action per observation.

    Observations are normalised by the `VecNormalize` of the model, if any. A checkpoint only contains the name: wrap
    the model under the same name before loading it.
    """
    if "lstm" in type(model.policy).__name__.lower():
        raise UserError(f"The model '{name}' is recurrent, which is not supported; use a feedforward model.")
    low, _ = action_bounds(model.action_space, name)
    space = model.observation_space
    specs = ObservationMap(space).specs
    spec = PolicySpec({key: entry.shape for key, entry in specs.items()}, len(low))
    normalize = model.get_vec_normalize_env()

    def act(obs: Observation) -> NDArray[np.float32]:
        leaves = {key: _as_leaf(key, value[:, -1], _leaf(space, key)) for key, value in obs.items()}
        inputs: Any = leaves if isinstance(space, spaces.Dict) else next(iter(leaves.values()))
        if isinstance(space, spaces.Dict):
            inputs = {k if k in space.spaces else k.removeprefix(IMAGE_PREFIX): v for k, v in leaves.items()}
        actions, _ = model.predict(inputs if normalize is None else normalize.normalize_obs(inputs), deterministic=True)
        return actions.reshape(len(actions), 1, -1)

    return CallablePolicy.wrap(name, act, spec, noise=False)


def _leaf(space: spaces.Space[Any], key: str) -> spaces.Space[Any]:
    if not isinstance(space, spaces.Dict):
        return space
    return space[key] if key in space.spaces else space[key.removeprefix(IMAGE_PREFIX)]


def _as_leaf(key: str, value: Tensor, leaf: spaces.Space[Any]) -> NDArray[Any]:
    """Convert a batch to the format of its space."""
    array = value.cpu().numpy()
    if key.startswith(IMAGE_PREFIX) and leaf.shape is not None and leaf.shape[0] != 3:
        return array.transpose(0, 2, 3, 1)
    return array.reshape(len(array), *(leaf.shape or ()))


def _pushed(history: Tensor, newest: Tensor, repeated: Tensor, fresh: Tensor) -> Tensor:
    """Append the newest observation to the history, or repeat it where an episode starts."""
    pushed = torch.cat([history[:, 1:].to(newest.device), newest.unsqueeze(1)], 1)
    return torch.where(fresh.to(pushed.device).reshape(-1, *[1] * (pushed.dim() - 1)), repeated, pushed)
