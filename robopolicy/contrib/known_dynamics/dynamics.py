"""Known, differentiable dynamics: the contract of tasks whose physics is a function in torch.

A task defines its dynamics once, as pure functions of the batch. `DynamicsSim` turns them into an ordinary simulator
for evaluation, comparison and videos; `robopolicy.contrib.known_dynamics.scenarios.unroll` differentiates through the
same functions.

Everything random in an episode, its initial state and all disturbances, is its *scenario*, which the episode seed
determines. So policies are compared and differentiated on common random numbers. A task may also return logged
disturbances. Episodes last `spec.max_episode_steps` steps, because an end that depends on the state would have no
gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step
from robopolicy.sim.vector_env import TorchVectorEnv


@dataclass(frozen=True)
class Outcome:
    """Result of a control step."""

    state: Tensor  # (B, S)
    reward: Tensor  # (B,)
    info: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # (B,) each, e.g. reward terms


class DifferentiableDynamics(ABC):
    """Dynamics as functions of batches, with S numbers of state, A of action and W of disturbance.

    `observe` and `step` are differentiable almost everywhere, compute in the dtype of the state, treat rows
    independently and change nothing in place.
    """

    spec: SimSpec

    @abstractmethod
    def scenario(self, seed: int) -> tuple[Tensor, Tensor]:
        """Initial state `(S,)` and disturbances `(T, W)` of the episode `seed` with T control steps; float32."""

    @abstractmethod
    def observe(self, state: Tensor) -> Observation:
        """Observation `{key: (B, ...)}` of `state` `(B, S)`."""

    @abstractmethod
    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> Outcome:
        """One control step from `state` `(B, S)` with an `action` `(B, A)` within the bounds and `noise` `(B, W)`."""

    def is_success(self, state: Tensor) -> Tensor | None:
        """Whether an episode that ends in `state` `(B, S)` is a success `(B,)` bool; None without a definition."""
        return None

    def draw(self, state: Tensor, height: int, width: int) -> Tensor:
        """Images `(B, 3, height, width)` uint8 of `state` `(B, S)`."""
        raise RuntimeError(f"Task {self.spec.task} cannot be rendered.")

    def scenarios(self, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Initial states `(B, S)` and disturbances `(B, T, W)` of several episodes."""
        drawn = [self.scenario(seed) for seed in seeds]
        return torch.stack([state for state, _ in drawn]), torch.stack([noise for _, noise in drawn])


class DynamicsSim(TorchVectorEnv):
    """Simulator of N rows of known dynamics."""

    def __init__(self, dynamics: DifferentiableDynamics, num_envs: int) -> None:
        super().__init__(dynamics.spec, num_envs)
        self.dynamics = dynamics
        state, noise = dynamics.scenarios([0])
        if noise.shape[1] != dynamics.spec.max_episode_steps:
            raise ValueError(f"Scenarios of {dynamics.spec.task} must have one row of noise per control step.")
        self._state = state.repeat(num_envs, 1)  # (N, S)
        self._noise = noise.repeat(num_envs, 1, 1)  # (N, T, W)

    @torch.no_grad()
    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Take one control step of the rows where `active`."""
        active, clipped = self.active_rows(active), self.clipped_action(action)
        noise = self._noise[torch.arange(self.num_envs), self.episode_step]
        outcome = self.dynamics.step(self._state, clipped, noise)
        finite = active & outcome.state.isfinite().all(1) & outcome.reward.isfinite()
        self._state = torch.where(finite[:, None], outcome.state, self._state)
        self.episode_step = self.episode_step + active
        diverged = active & ~finite
        truncated = finite & (self.episode_step >= self.spec.max_episode_steps)
        info = {key: torch.where(finite, value, 0.0) for key, value in outcome.info.items()}
        info["diverged"] = diverged
        solved = self.dynamics.is_success(self._state)
        if solved is not None:
            info["success"] = truncated & solved
        final = self.observe()
        self.restart(truncated | diverged)
        return Step(
            obs=self.observe(),
            reward=torch.where(finite, outcome.reward, 0.0),
            terminated=diverged,
            truncated=truncated,
            final_obs=final,
            info=info,
        )

    @torch.no_grad()
    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames of the first `envs` rows."""
        if camera is not None:
            raise UserError(f"Task {self.spec.task} has a single unnamed view; drop the camera, got '{camera}'.")
        return self.dynamics.draw(self._state[:envs], height, width)

    @torch.no_grad()
    def observe(self) -> Observation:
        """Observation of all rows."""
        return {key: value.clone() for key, value in self.dynamics.observe(self._state).items()}

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Draw the scenarios of new episodes."""
        state, noise = self._state.clone(), self._noise.clone()
        state[rows], noise[rows] = self.dynamics.scenarios(seeds)
        self._state, self._noise = state, noise

    def state_dict(self) -> dict[str, Any]:
        """States, scenarios, counters and seeds."""
        return super().state_dict() | {"state": self._state, "noise": self._noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._state, self._noise = state["state"].clone(), state["noise"].clone()
        return super().load_state_dict(state)
