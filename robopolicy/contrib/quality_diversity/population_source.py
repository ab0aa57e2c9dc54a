"""Data sources of complete episodes for algorithms that vary and select policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.contrib.quality_diversity.dcg_map_elites import DCGMAPElites
from robopolicy.contrib.quality_diversity.generation import PopulationBatch
from robopolicy.contrib.quality_diversity.individuals import EvaluatedPolicies
from robopolicy.contrib.quality_diversity.population import ObservationSampler, PopulationSampler
from robopolicy.contrib.quality_diversity.stacked_policies import Population
from robopolicy.contrib.quality_diversity.stax import STAX
from robopolicy.device import move
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.config import ReplayConfig
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.replay_source import make_replay


class EvaluationSource:
    """Base of the population sources."""

    whole_episodes: ClassVar[bool] = True
    uses_replay: ClassVar[bool] = False
    sampler: PopulationSampler | ObservationSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, population: Population, seed: int) -> None:
        self.sim, self.device, self.population = sim, device, population
        self._first = sim.reset(seed)

    def _act(self, members: Tensor, obs: Observation) -> Tensor:
        return self.population.act(move(members, self.device), move(obs, self.device))

    @property
    def env_steps(self) -> int:
        """Total control steps."""
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


class PopulationSource(EvaluationSource):
    """Generations of policies, with windows of all stored episodes."""

    uses_replay = True
    sampler: PopulationSampler

    def __init__(
        self, sim: ChunkedSim, device: torch.device, algorithm: DCGMAPElites, *, settings: ReplayConfig, seed: int
    ) -> None:
        """Create the source.

        Args:
            sim: Simulator with descriptors.
            device: Device of the batches.
            algorithm: Algorithm that provides candidates and the sample specification.
            settings: Replay settings.
            seed: First episode seed, and seed of the sampling.
        """
        if settings.prioritized:
            raise UserError("Population replay does not support priorities; set replay.prioritized=0.")
        super().__init__(sim, device, algorithm.population, seed)
        self.sample_spec = algorithm.sample_spec
        self._generator = torch.Generator().manual_seed(seed)
        self.sampler = PopulationSampler(sim, make_replay(settings, self.sample_spec, sim), seed=seed)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Build the source for the algorithm's population."""
        algorithm = context.algorithm
        assert isinstance(algorithm, DCGMAPElites)
        settings = context.config.replay
        return cls(context.chunked_sim(), context.device, algorithm, settings=settings, seed=context.seed)

    def next(self, algorithm: Algorithm) -> PopulationBatch:
        """Evaluate the candidates, and sample the windows of the next gradient steps."""
        assert isinstance(algorithm, DCGMAPElites)
        scores = self.sampler.evaluate(self._act, algorithm.candidates)
        windows = self.sampler.replay.sample(self.sample_spec, self._generator, batches=algorithm.config.critic_steps)
        return move(PopulationBatch(algorithm.candidates, scores, windows), self.device)

    def state_dict(self) -> dict[str, Any]:
        """States of sampler and generator."""
        return {**super().state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])
        return super().load_state_dict(state)


class ObservationSource(EvaluationSource):
    """Evaluations of all members on the same episodes, with observations."""

    sampler: ObservationSampler

    def __init__(self, sim: ChunkedSim, device: torch.device, algorithm: STAX, *, seed: int) -> None:
        super().__init__(sim, device, algorithm.population, seed)
        config = algorithm.config
        self.sampler = ObservationSampler(sim, views=config.views, starts=config.starts, seed=seed)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Build the source for the algorithm's candidates."""
        assert isinstance(context.algorithm, STAX)
        return cls(context.chunked_sim(), context.device, context.algorithm, seed=context.seed)

    def next(self, algorithm: Algorithm) -> EvaluatedPolicies:
        """Evaluate the candidates."""
        assert isinstance(algorithm, STAX)
        return self.sampler.evaluate(self._act, algorithm.candidates)
