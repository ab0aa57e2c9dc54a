"""Where experience comes from: one small object per kind, so that the loop is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from robopolicy.algorithms.base import Algorithm
from robopolicy.algorithms.off_policy import OffPolicy
from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.data.replay import MixedReplay, Replay, Transitions
from robopolicy.data.rollout import GroupRollout, Rollout
from robopolicy.policies.base import Observation, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.samplers.group import GroupSampler
from robopolicy.samplers.replay import ReplaySampler
from robopolicy.samplers.rollout import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.config import ReplayConfig


class Source(Protocol):
    """An endless stream of batches for `Algorithm.update`."""

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        ...

    def next(self, algorithm: Algorithm) -> Any:
        """The next batch."""
        ...

    def metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        ...

    def observations(self) -> Observation:
        """A few observations `{key: (B, To, ...)}` as the policy sees them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the coming batches."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`; False where the coming batches will nevertheless differ."""
        ...

    def close(self) -> None:
        """Free threads and files."""
        ...


class DatasetSource:
    """Shuffled chunks of a dataset."""

    env_steps = 0

    def __init__(self, sampler: ChunkSampler, device: torch.device) -> None:
        self.sampler = sampler
        self.device = device

    def next(self, algorithm: Algorithm) -> ChunkBatch:
        """The next minibatch."""
        return _move(next(self.sampler), self.device)

    def metrics(self) -> dict[str, float]:
        """Completed passes over the data."""
        return {"data/epoch": float(self.sampler.epoch)}

    def observations(self) -> Observation:
        """Observations spread over the dataset."""
        frames = torch.linspace(0, len(self.sampler) - 1, 4).long()
        return _move(self.sampler.take(frames).obs, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:
        """Nothing to free."""


class RolloutSource:
    """On-policy rollouts in a simulator."""

    def __init__(self, sim: ChunkedSim, device: torch.device, *, decisions: int, seed: int) -> None:
        self.sim = sim
        self.device = device
        self._seed = seed
        self._first = sim.reset(seed)  # the sampler resets to the same episodes
        self.sampler = RolloutSampler(sim, decisions=decisions, seed=seed)

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        return self.sampler.env_steps

    def next(self, algorithm: Algorithm) -> Rollout:
        """Play one rollout with the current policy."""
        return _move(self.sampler.collect(_between(self.sim, self.device, algorithm.act)), self.device)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes that have ended since the last call."""
        return self.sampler.episode_stats()

    def observations(self) -> Observation:
        """The first observations of training."""
        return _move(self._first, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Simulator, running episodes, exploration noise; only the count of steps where a backend hides its state."""
        try:
            return self.sampler.state_dict()
        except RuntimeError:
            return {"env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`, or start fresh episodes with seeds that cannot have been played yet."""
        if "sim" in state:
            self.sampler.load_state_dict(state)
            return True
        steps = int(state["env_steps"])
        self.sampler = RolloutSampler(self.sim, decisions=self.sampler.decisions, seed=self._seed + steps)
        self.sampler.env_steps = steps
        return False

    def close(self) -> None:
        """Stop the simulator."""
        self.sim.sim.close()


class GroupSource:
    """Whole episodes in a simulator, several from each start state."""

    def __init__(self, sim: ChunkedSim, device: torch.device, *, group_size: int, seed: int) -> None:
        self.sim = sim
        self.device = device
        self.sampler = GroupSampler(sim, group_size=group_size, seed=seed)
        self._first = self.sampler.first_observations()

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        return self.sampler.env_steps

    def next(self, algorithm: Algorithm) -> GroupRollout:
        """Play one episode per environment with the current policy."""
        return _move(self.sampler.collect(_between(self.sim, self.device, algorithm.act)), self.device)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes that have ended since the last call."""
        return self.sampler.episode_stats()

    def observations(self) -> Observation:
        """The first observations of training."""
        return _move(self._first, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Seeds and exploration noise; no backend has to save its state."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:
        """Stop the simulator."""
        self.sim.sim.close()


class ReplaySource:
    """Replayed windows of what was played and, where given, of a dataset: one loop from offline to online."""

    def __init__(
        self,
        sim: ChunkedSim | None,
        offline: Replay | None,
        device: torch.device,
        *,
        settings: ReplayConfig,
        decisions: int,
        utd: float,
        gamma: float,
        seed: int,
    ) -> None:
        """Get ready.

        Args:
            sim: Simulator to play in; None learns from the dataset alone.
            offline: The dataset as a memory.
            device: Where batches go.
            settings: Sizes and schedule.
            decisions: Chunk decisions per environment between updates.
            utd: Gradient steps per decision of one environment.
            gamma: Discount of the returns to go that the memory keeps.
            seed: First episode seed, and seed of exploration and sampling.
        """
        self.settings, self.device, self.offline = settings, device, offline
        self.decisions = decisions
        self._generator = torch.Generator().manual_seed(seed)
        self._seed, self._gamma = seed, gamma
        self._left = settings.offline_updates if sim else -1  # offline updates to come; negative: always offline
        self.sampler = None if sim is None else self._sampler(sim, seed)
        self.batches = 1 if sim is None else max(1, round(utd * sim.sim.num_envs * decisions))
        self._batch: Transitions | None = None

    def _sampler(self, sim: ChunkedSim, seed: int) -> ReplaySampler:
        lanes = sim.sim.num_envs
        replay = Replay(self.settings.capacity, lanes, gamma=self._gamma, prioritized=self.settings.prioritized)
        return ReplaySampler(sim, replay, seed=seed)

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        return 0 if self.sampler is None else self.sampler.env_steps

    def next(self, algorithm: Algorithm) -> Transitions:
        """Play a little, then sample the windows of the next `batches` gradient steps."""
        assert isinstance(algorithm, OffPolicy)
        if self._batch is not None and algorithm.errors is not None:
            self._memory().update_priorities(self._batch, algorithm.errors)
        if self._left == 0:
            self._play(algorithm)
        elif self._left > 0:
            self._left -= 1
        batch = self._memory().sample(algorithm.request, self._generator, batches=self.batches)
        self._batch = batch if self.settings.prioritized else None
        return _move(batch, self.device)

    def _memory(self) -> Replay | MixedReplay:
        played = self.sampler is not None and self.sampler.env_steps > 0
        if self.offline is None:
            assert self.sampler is not None
            return self.sampler.replay
        if not played or self.sampler is None:
            return self.offline
        return MixedReplay(self.offline, self.sampler.replay, self.settings.offline_share)

    def _play(self, algorithm: OffPolicy) -> None:
        assert self.sampler is not None
        sampler = self.sampler
        while sampler.env_steps < self.settings.warmup_steps:
            sampler.play(_between(sampler.sim, self.device, algorithm.explore))
        sampler.play(_between(sampler.sim, self.device, algorithm.act), self.decisions)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes that have ended since the last call."""
        return {} if self.sampler is None else self.sampler.episode_stats()

    def observations(self) -> Observation:
        """A few observations from the dataset or the simulator."""
        if self.sampler is not None:
            return _move(self.sampler.observations(), self.device)
        assert self.offline is not None
        return _move(self.offline.observations(), self.device)

    def state_dict(self) -> dict[str, Any]:
        """Simulator, memory and generator; without the simulator where a backend hides its state."""
        state = {"left": self._left, "generator": self._generator.get_state(), "batch": self._batch}
        if self.sampler is not None:
            try:
                state["sampler"] = self.sampler.state_dict()
            except RuntimeError:
                state["replay"] = self.sampler.replay.state_dict()
                state["env_steps"] = self.env_steps
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`, or start fresh episodes with seeds that cannot have been played yet."""
        self._left = int(state["left"])
        self._generator.set_state(state["generator"])
        if self.sampler is None or "sampler" in state:
            if self.sampler is not None:
                self.sampler.load_state_dict(state["sampler"])
            return True
        steps = int(state["env_steps"])
        replay = self.sampler.replay
        self.sampler = ReplaySampler(self.sampler.sim, replay, seed=self._seed + steps)
        replay.load_state_dict(state["replay"])
        self.sampler.env_steps = steps
        return False

    def close(self) -> None:
        """Stop the simulator."""
        if self.sampler is not None:
            self.sampler.sim.sim.close()


def _between(sim: ChunkedSim, device: torch.device, draw: Callable[..., Sample]) -> Callable[..., Sample]:
    """`draw` on the device of the networks, for observations from and chunks to that of the simulator."""

    def act(obs: Observation, *, generator: Randomness) -> Sample:
        sample = draw(_move(obs, device), generator=generator)
        return replace(sample, chunk=sample.chunk.to(sim.sim.device))

    return act


def _move(value: Any, device: torch.device) -> Any:
    """Copy of a tensor, a mapping or a dataclass of them on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: _move(getattr(value, entry.name), device) for entry in fields(value)})
    return value
