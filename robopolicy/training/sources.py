"""Common sources of training data: chunks of a dataset, rollouts and groups of episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.core.distributed import rank, world_size
from robopolicy.data.batches import Rollout
from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.device import move
from robopolicy.policies.base import Observation, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.rollout.groups import GroupSampler
from robopolicy.rollout.on_policy import Act, RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.make_source import DataSource, SourceContext


class DatasetSource:
    """Shuffled chunks of a dataset; where a person took over from a policy, only of the person."""

    whole_episodes: ClassVar[bool] = False
    uses_replay: ClassVar[bool] = False
    env_steps = 0

    def __init__(self, sampler: ChunkSampler, device: torch.device) -> None:
        self.sampler = sampler
        self.device = device

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source for a run."""
        spec, episodes = context.spec, context.dataset()
        sampler = ChunkSampler(
            episodes,
            horizon=spec.horizon,
            obs_horizon=spec.obs_horizon,
            batch_size=context.settings.batch_size,
            seed=context.config.seed,
            lookahead_steps=context.algorithm.lookahead_steps,
            part=slice(rank(), None, world_size()),
            learned=episodes.demonstrated_frames(),
            device=context.device,
        )
        return cls(sampler, context.device)

    def next(self, algorithm: Algorithm) -> ChunkBatch:
        """Return the next minibatch."""
        return move(next(self.sampler), self.device)

    def metrics(self) -> dict[str, float]:
        """Return the number of passes over the data."""
        return {"data/epoch": float(self.sampler.epoch)}

    def observations(self) -> Observation:
        """Return observations spread over the dataset."""
        places = np.linspace(0, len(self.sampler) - 1, 4).astype(np.int64)
        return move(self.sampler.take(torch.from_numpy(self.sampler.frames[places])).obs, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:
        """Do nothing."""


class SimSource:
    """Base class of sources that collect data in a simulator with the current policy."""

    sampler: Any  # with `collect`, `env_steps` and `episode_stats`
    _first: Observation

    def __init__(self, sim: ChunkedSim, device: torch.device) -> None:
        self.sim = sim
        self.device = device

    @property
    def env_steps(self) -> int:
        """Number of control steps so far."""
        return self.sampler.env_steps

    def next(self, algorithm: Algorithm) -> Any:
        """Collect a batch with the current policy."""
        return self.collect(algorithm.act)

    def collect(self, act: Act) -> Any:
        """Collect a batch with the actions of `act`."""
        return move(self.sampler.collect(on_device(self.sim, self.device, act)), self.device)

    def metrics(self) -> dict[str, float]:
        """Return means over the episodes that have ended since the last call."""
        return self.sampler.episode_stats()

    def observations(self) -> Observation:
        """Return the first observations of training."""
        return move(self._first, self.device)

    def close(self) -> None:
        """Stop the simulator."""
        self.sim.sim.close()


class RolloutSource(SimSource):
    """On-policy rollouts in a simulator."""

    whole_episodes: ClassVar[bool] = False
    uses_replay: ClassVar[bool] = False
    sampler: RolloutSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, *, decisions: int, seed: int, memory: int = 0) -> None:
        super().__init__(sim, device)
        self._seed = seed
        self._memory = memory
        self._decisions = decisions
        self.sampler = self._make_sampler(seed)
        self._first = self.sampler.observations()

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source for a run."""
        decisions, memory = context.settings.num_steps, context.spec.hidden_dim
        source = cls(context.chunked_sim(), context.device, decisions=decisions, seed=context.seed, memory=memory)
        return context.overlapped(source)

    def collects_next(self) -> bool:
        """Every batch is a rollout."""
        return True

    def next(self, algorithm: Algorithm, collected: Rollout | None = None) -> Rollout:
        """Return the rollout `collected`, or collect one."""
        return self.collect(algorithm.act) if collected is None else collected

    def _make_sampler(self, seed: int) -> RolloutSampler:
        return RolloutSampler(self.sim, decisions=self._decisions, seed=seed, memory=self._memory)

    def state_dict(self) -> dict[str, Any]:
        """Return simulator, running episodes and noise; only the step count if the backend cannot save its state."""
        try:
            return self.sampler.state_dict()
        except RuntimeError:
            return {"env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`, or start new episodes with unused seeds."""
        if "sim" in state:
            self.sampler.load_state_dict(state)
            return True
        steps = int(state["env_steps"])
        self.sampler = self._make_sampler(self._seed + steps)
        self.sampler.env_steps = steps
        return False


class GroupSource(SimSource):
    """Whole episodes, in groups with a common initial state."""

    whole_episodes: ClassVar[bool] = True
    uses_replay: ClassVar[bool] = False
    sampler: GroupSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, *, group_size: int, seed: int) -> None:
        super().__init__(sim, device)
        self.sampler = GroupSampler(sim, group_size=group_size, seed=seed)
        self._first = self.sampler.first_observations()

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source for a run with the group size of the algorithm."""
        size = context.settings.group_size
        return cls(context.chunked_sim(), context.device, group_size=size, seed=context.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return seeds and exploration noise, without the state of the simulator."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True


def on_device(sim: ChunkedSim, device: torch.device, draw: Callable[..., Sample]) -> Callable[..., Sample]:
    """Wrap `draw` to receive observations on and return chunks to the device of the simulator."""

    def act(obs: Observation, *, generator: Randomness) -> Sample:
        sample = draw(move(obs, device), generator=generator)
        memory = None if sample.memory is None else sample.memory.to(sim.sim.device)
        return replace(sample, chunk=sample.chunk.to(sim.sim.device), memory=memory)

    return act
