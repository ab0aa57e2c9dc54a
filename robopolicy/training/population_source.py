"""Experience for the algorithms that vary and select policies: one episode of every candidate, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from robopolicy.algorithms.dcg_map_elites import DCGMAPElites
from robopolicy.algorithms.frames.base import Algorithm
from robopolicy.data.generation import Generation
from robopolicy.policies.base import Observation
from robopolicy.samplers.population import PopulationSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.config import ReplayConfig
from robopolicy.training.replay_source import make_memory
from robopolicy.training.sources import move


class PopulationSource:
    """Generations of a repertoire."""

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
        self.sim, self.device, self.request = sim, device, algorithm.request
        self._generator = torch.Generator().manual_seed(seed)
        self._first = sim.reset(seed)
        self.sampler = PopulationSampler(sim, make_memory(settings, self.request, sim), seed=seed)

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        return self.sampler.env_steps

    def next(self, algorithm: Algorithm) -> Generation:
        """Play the candidates, and sample the windows of the next gradient steps."""
        assert isinstance(algorithm, DCGMAPElites)

        def act(members: torch.Tensor, obs: Observation) -> torch.Tensor:
            return algorithm.act_as(members, move(obs, self.device))

        scores = self.sampler.play(act, algorithm.candidates)
        windows = self.sampler.replay.sample(self.request, self._generator, batches=algorithm.config.critic_steps)
        return move(Generation(algorithm.candidates, scores, windows), self.device)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes since the last call."""
        return self.sampler.episode_stats()

    def observations(self) -> Observation:
        """The first observations of training."""
        return move(self._first, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Seeds, memory and generator; no backend has to save its state."""
        return {"sampler": self.sampler.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state["sampler"])
        self._generator.set_state(state["generator"])
        return True

    def close(self) -> None:
        """Stop the simulator."""
        self.sim.sim.close()
