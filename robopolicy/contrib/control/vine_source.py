"""Data source of rollouts with vines, for algorithms that compare episodes from the same state."""

from __future__ import annotations

from typing import ClassVar

import torch

from robopolicy.contrib.control.vine_rollout import VineSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.sources import RolloutSource


class VineSource(RolloutSource):
    """On-policy rollouts with complete episodes that branch off at some of their states."""

    whole_episodes: ClassVar[bool] = True

    def __init__(
        self, sim: ChunkedSim, device: torch.device, *, decisions: int, branch_points: int, branches: int, seed: int
    ) -> None:
        self._branch_points, self._branches = branch_points, branches
        super().__init__(sim, device, decisions=decisions, seed=seed)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Build the source with the configured number of branches."""
        settings = context.settings
        return cls(
            context.chunked_sim(),
            context.device,
            decisions=settings.num_steps,
            branch_points=settings.branch_points,
            branches=settings.branches,
            seed=context.seed,
        )

    def _make_sampler(self, seed: int) -> VineSampler:
        return VineSampler(
            self.sim, decisions=self._decisions, branch_points=self._branch_points, branches=self._branches, seed=seed
        )
