"""Whole episodes of every candidate, for the algorithms that vary and select policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.contrib.quality_diversity.dcg_map_elites import DCGMAPElites
from robopolicy.contrib.quality_diversity.generation import PopulationBatch
from robopolicy.contrib.quality_diversity.individuals import Individuals
from robopolicy.contrib.quality_diversity.population import PopulationSampler, ViewSampler
from robopolicy.contrib.quality_diversity.stacked_policies import Population
from robopolicy.contrib.quality_diversity.stax import STAX
from robopolicy.device import move
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.config import ReplayConfig
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.replay_source import make_replay


class PlayedPopulation:
    """What the sources of populations have in common."""

    whole_episodes: ClassVar[bool] = True
    sampler: PopulationSampler | ViewSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, population: Population, seed: int) -> None:
        self.sim, self.device, self.population = sim, device, population
        self._first = sim.reset(seed)

    def _act(self, members: Tensor, obs: Observation) -> Tensor:
        return self.population.play(move(members, self.device), move(obs, self.device))

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        return self.sampler.env_steps

    def metrics(self) -> dict[str, float]:
        """Means over the episodes since the last call."""
        return self.sampler.episode_stats()

    def observations(self) -> Observation:
        """The first observations of training."""
        return move(self._first, self.device)

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler; no backend has to save its own."""
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state["sampler"])
        return True

    def close(self) -> None:
        """Stop the simulator."""
        self.sim.sim.close()


class PopulationSource(PlayedPopulation):
    """Generations of policies, and windows of everything that they ever played."""

    sampler: PopulationSampler

    def __init__(
        self, sim: ChunkedSim, device: torch.device, algorithm: DCGMAPElites, *, settings: ReplayConfig, seed: int
    ) -> None:
        """Get ready.

        Args:
            sim: Simulator that shows and measures descriptors.
            device: Where batches go.
            algorithm: Says who is played and what is sampled.
            settings: Size of the memory.
            seed: First episode seed, and seed of the sampling.
        """
        if settings.prioritized:
            raise UserError("What a population played is not drawn from by priority; set replay.prioritized=0.")
        super().__init__(sim, device, algorithm.population, seed)
        self.sample_spec = algorithm.sample_spec
        self._generator = torch.Generator().manual_seed(seed)
        self.sampler = PopulationSampler(sim, make_replay(settings, self.sample_spec, sim), seed=seed)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Generations of the algorithm's repertoire."""
        algorithm = context.algorithm
        assert isinstance(algorithm, DCGMAPElites)
        settings = context.config.replay
        return cls(context.chunked_sim(), context.device, algorithm, settings=settings, seed=context.seed)

    def next(self, algorithm: Algorithm) -> PopulationBatch:
        """Play the candidates, and sample the windows of the next gradient steps."""
        assert isinstance(algorithm, DCGMAPElites)
        scores = self.sampler.play(self._act, algorithm.candidates)
        windows = self.sampler.replay.sample(self.sample_spec, self._generator, batches=algorithm.config.critic_steps)
        return move(PopulationBatch(algorithm.candidates, scores, windows), self.device)

    def state_dict(self) -> dict[str, Any]:
        """Seeds, memory and generator."""
        return {**super().state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])
        return super().load_state_dict(state)


class ViewSource(PlayedPopulation):
    """Members that all play the same episodes, with what they saw on the way."""

    sampler: ViewSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, algorithm: STAX, *, seed: int) -> None:
        super().__init__(sim, device, algorithm.population, seed)
        config = algorithm.config
        self.sampler = ViewSampler(sim, views=config.views, starts=config.starts, seed=seed)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Members that the algorithm asks for."""
        assert isinstance(context.algorithm, STAX)
        return cls(context.chunked_sim(), context.device, context.algorithm, seed=context.seed)

    def next(self, algorithm: Algorithm) -> Individuals:
        """Play who is asked for."""
        assert isinstance(algorithm, STAX)
        return self.sampler.play(self._act, algorithm.candidates)
