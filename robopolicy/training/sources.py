"""Where experience comes from: one small object per kind, so that the loop is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from robopolicy.algorithms.frames.base import Algorithm
from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.data.replay import Replay
from robopolicy.data.rollout import HybridRollout
from robopolicy.data.transitions import Request
from robopolicy.device import move
from robopolicy.policies.base import Observation, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.samplers.group import GroupSampler
from robopolicy.samplers.rollout import RolloutSampler
from robopolicy.samplers.vine import VineSampler
from robopolicy.sim.chunk import ChunkedSim


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
        return move(next(self.sampler), self.device)

    def metrics(self) -> dict[str, float]:
        """Completed passes over the data."""
        return {"data/epoch": float(self.sampler.epoch)}

    def observations(self) -> Observation:
        """Observations spread over the dataset."""
        frames = torch.linspace(0, len(self.sampler) - 1, 4).long()
        return move(self.sampler.take(frames).obs, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:
        """Nothing to free."""


class PlayedSource:
    """What a sampler plays in a simulator with the current policy; subclasses say how it is resumed."""

    sampler: Any  # with `collect`, `env_steps` and `episode_stats`
    _first: Observation

    def __init__(self, sim: ChunkedSim, device: torch.device) -> None:
        self.sim = sim
        self.device = device

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        return self.sampler.env_steps

    def next(self, algorithm: Algorithm) -> Any:
        """Play with the current policy."""
        return move(self.sampler.collect(between(self.sim, self.device, algorithm.act)), self.device)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes that have ended since the last call."""
        return self.sampler.episode_stats()

    def observations(self) -> Observation:
        """The first observations of training."""
        return move(self._first, self.device)

    def close(self) -> None:
        """Stop the simulator."""
        self.sim.sim.close()


class RolloutSource(PlayedSource):
    """On-policy rollouts."""

    sampler: RolloutSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, *, decisions: int, seed: int, memory: int = 0) -> None:
        super().__init__(sim, device)
        self._seed = seed
        self._memory = memory
        self._decisions = decisions
        self.sampler = self._make_sampler(seed)
        self._first = self.sampler.observations()

    def _make_sampler(self, seed: int) -> RolloutSampler:
        return RolloutSampler(self.sim, decisions=self._decisions, seed=seed, memory=self._memory)

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
        self.sampler = self._make_sampler(self._seed + steps)
        self.sampler.env_steps = steps
        return False


class HybridSource(RolloutSource):
    """On-policy rollouts, each with windows of a dataset."""

    def __init__(
        self,
        sim: ChunkedSim,
        device: torch.device,
        offline: Replay,
        *,
        request: Request,
        decisions: int,
        seed: int,
    ) -> None:
        super().__init__(sim, device, decisions=decisions, seed=seed)
        self.offline, self.request = offline, request
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, algorithm: Algorithm) -> HybridRollout:
        """Play one rollout with the current policy, and draw from the dataset."""
        windows = self.offline.sample(self.request, self._generator)
        return HybridRollout(**vars(super().next(algorithm)), offline=move(windows, self.device))

    def state_dict(self) -> dict[str, Any]:
        """That of the rollouts, and the generator of the windows."""
        return {**super().state_dict(), "windows": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._generator.set_state(state["windows"])
        return super().load_state_dict(state)


class VineSource(RolloutSource):
    """On-policy rollouts with vines."""

    def __init__(
        self, sim: ChunkedSim, device: torch.device, *, decisions: int, forks: int, vines: int, seed: int
    ) -> None:
        self._forks, self._vines = forks, vines
        super().__init__(sim, device, decisions=decisions, seed=seed)

    def _make_sampler(self, seed: int) -> VineSampler:
        return VineSampler(self.sim, decisions=self._decisions, forks=self._forks, vines=self._vines, seed=seed)


class GroupSource(PlayedSource):
    """Whole episodes, several from each start state."""

    sampler: GroupSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, *, group_size: int, seed: int) -> None:
        super().__init__(sim, device)
        self.sampler = GroupSampler(sim, group_size=group_size, seed=seed)
        self._first = self.sampler.first_observations()

    def state_dict(self) -> dict[str, Any]:
        """Seeds and exploration noise; no backend has to save its state."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True


def between(sim: ChunkedSim, device: torch.device, draw: Callable[..., Sample]) -> Callable[..., Sample]:
    """`draw` on the device of the networks, for observations from and chunks to that of the simulator."""

    def act(obs: Observation, *, generator: Randomness) -> Sample:
        sample = draw(move(obs, device), generator=generator)
        memory = None if sample.memory is None else sample.memory.to(sim.sim.device)
        return replace(sample, chunk=sample.chunk.to(sim.sim.device), memory=memory)

    return act
