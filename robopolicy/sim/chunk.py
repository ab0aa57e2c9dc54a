"""Execution of action chunks on a simulator, with observation histories.

The wrapper executes the first `action_horizon` actions of each chunk and sums the discounted reward. A row whose
episode ends is paused at the first observation of its next episode until the chunks of all rows are finished. Where
rows cannot pause (`spec.supports_masked_step` is False), it continues unrecorded and starts its next episode after the
chunk: an episode then costs up to `action_horizon - 1` further steps, but no policy call of its own. The number of
recorded steps is reported, so that the bootstrap factor is `gamma ** steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from robopolicy.sim.contract import TERM_PREFIX, UNDISCOUNTED_PREFIX, Observation, Step, VectorSim


@dataclass(frozen=True)
class ChunkStep:
    """Result of one chunk of all environments."""

    obs: Observation  # (N, To, ...) history to act on next
    reward: Tensor  # (N,) sum of gamma**j * reward_j over the executed steps
    undiscounted: Tensor  # (N,) undiscounted sum of the rewards
    steps: Tensor  # (N,) int64, control steps executed
    terminated: Tensor  # (N,) bool
    truncated: Tensor  # (N,) bool
    final_obs: Observation  # (N, To, ...) true successor history; equals `obs` where the episode continues
    info: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # (N, ...) of the last step, reward terms summed

    @property
    def done(self) -> Tensor:
        """(N,) bool, terminated or truncated."""
        return self.terminated | self.truncated


@dataclass(frozen=True)
class StepTrace:
    """One control step inside a chunk."""

    action: Tensor  # (N, A) before clipping by the simulator
    step: Step
    active: Tensor  # (N,) bool, which rows moved


class ChunkedSim:
    """Wrapper that executes action chunks on a `VectorSim` and keeps the observation history."""

    def __init__(self, sim: VectorSim, *, action_horizon: int = 1, obs_horizon: int = 1, gamma: float = 1.0) -> None:
        """Wrap `sim`; actions per chunk Ta, observations per history To, discount per control step `gamma`.

        At the start of an episode, the history repeats the first observation.
        """
        self.sim = sim
        self.action_horizon = action_horizon
        self.obs_horizon = obs_horizon
        self.gamma = gamma
        self._history: Observation = {}

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset the simulator and return histories `(N, To, ...)`."""
        self._history = self._repeat(self.sim.reset(seed))
        return dict(self._history)

    def step(self, chunk: Tensor, trace: list[StepTrace] | None = None) -> ChunkStep:
        """Run the first `action_horizon` actions of `chunk` `(N, H, A)`; append every control step to `trace`."""
        if self.action_horizon == 1:
            step = self.sim.step(chunk[:, 0])
            if trace is not None:
                trace.append(StepTrace(chunk[:, 0], step, torch.ones_like(step.terminated)))
            return self._single(step)
        sim, device = self.sim, self.sim.device
        reward, undiscounted = torch.zeros(2, sim.num_envs, device=device)
        steps = torch.zeros(sim.num_envs, dtype=torch.int64, device=device)
        terminated = torch.zeros(sim.num_envs, dtype=torch.bool, device=device)
        truncated = torch.zeros_like(terminated)
        final = self._history
        info: dict[str, Tensor] = {}
        pauses = sim.spec.supports_masked_step
        for j in range(self.action_horizon):
            active = ~(terminated | truncated)
            if device.type == "cpu" and not bool(active.any()):
                break
            step = sim.step(chunk[:, j], None if pauses and j == 0 else active)
            if trace is not None:
                trace.append(StepTrace(chunk[:, j], step, active))
            successor = self._push(step.final_obs)
            final = where_rows(active, successor, final)
            history = where_rows(step.done, self._repeat(step.obs), successor)
            self._history = where_rows(active, history, self._history)
            reward += torch.where(active, self.gamma**j * step.reward, 0.0)
            undiscounted += torch.where(active, step.reward, 0.0)
            steps += active
            terminated |= active & step.terminated
            truncated |= active & step.truncated
            before = info
            info = before | {key: _select(active, value, info.get(key, value)) for key, value in step.info.items()}
            for key in (key for key in step.info if key.startswith(TERM_PREFIX)):
                part = torch.where(active, step.info[key], 0.0)
                for name, value in ((key, self.gamma**j * part), (_undiscounted_key(key), part)):
                    info[name] = before.get(name, torch.zeros_like(part)) + value
        if not pauses:
            ended = terminated | truncated
            first, logged = sim.reset_rows(ended)
            self._history = where_rows(ended, self._repeat(first), self._history)
            info |= logged
        return ChunkStep(dict(self._history), reward, undiscounted, steps, terminated, truncated, final, info)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the simulator and the observation history."""
        return {"sim": self.sim.state_dict(), "history": dict(self._history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict` and return the histories to act on next."""
        self.sim.load_state_dict(state["sim"])
        self._history = {key: value.to(self.sim.device) for key, value in state["history"].items()}
        return dict(self._history)

    def _single(self, step: Step) -> ChunkStep:
        final = self._push(step.final_obs)
        if self.obs_horizon == 1:
            self._history = self._push(step.obs)
        else:
            self._history = where_rows(step.done, self._repeat(step.obs), final)
        ones = torch.ones(self.sim.num_envs, dtype=torch.int64, device=self.sim.device)
        ends = step.terminated, step.truncated
        terms = {_undiscounted_key(key): value for key, value in step.info.items() if key.startswith(TERM_PREFIX)}
        return ChunkStep(dict(self._history), step.reward, step.reward, ones, *ends, final, step.info | terms)

    def _repeat(self, obs: Observation) -> Observation:
        return {key: value.unsqueeze(1).repeat_interleave(self.obs_horizon, 1) for key, value in obs.items()}

    def _push(self, obs: Observation) -> Observation:
        if self.obs_horizon == 1:
            return {key: value.unsqueeze(1) for key, value in obs.items()}
        return {key: torch.cat([self._history[key][:, 1:], value.unsqueeze(1)], 1) for key, value in obs.items()}


def _undiscounted_key(key: str) -> str:
    return UNDISCOUNTED_PREFIX + key.removeprefix(TERM_PREFIX)


def _select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)


def where_rows(mask: Tensor, yes: Observation, no: Observation) -> Observation:
    """Select observations `yes` where `mask` `(N,)` is set and `no` elsewhere."""
    return {key: _select(mask, value, no[key]) for key, value in yes.items()}
