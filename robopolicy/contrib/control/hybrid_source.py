"""Rollouts with windows of a dataset, for algorithms that learn on-policy from both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.contrib.control.hnpg import HNPG
from robopolicy.contrib.control.hybrid_rollout import HybridRollout
from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.replay import Replay
from robopolicy.device import move
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.sources import RolloutSource


class HybridSource(RolloutSource):
    """On-policy rollouts, each with windows of a dataset."""

    whole_episodes: ClassVar[bool] = False

    def __init__(
        self,
        sim: ChunkedSim,
        device: torch.device,
        offline: Replay,
        *,
        sample_spec: ReplaySampleSpec,
        decisions: int,
        seed: int,
    ) -> None:
        super().__init__(sim, device, decisions=decisions, seed=seed)
        self.offline, self.sample_spec = offline, sample_spec
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Build the rollouts and the windows that the algorithm requests."""
        algorithm, settings = context.algorithm, context.settings
        assert isinstance(algorithm, HNPG)
        return cls(
            context.chunked_sim(),
            context.device,
            Replay.from_episodes(context.dataset(), gamma=settings.gamma),
            sample_spec=algorithm.sample_spec,
            decisions=settings.num_steps,
            seed=context.seed,
        )

    def next(self, algorithm: Algorithm) -> HybridRollout:
        """Collect one rollout with the current policy, and draw windows from the dataset."""
        windows = self.offline.sample(self.sample_spec, self._generator)
        return HybridRollout(**vars(super().next(algorithm)), offline=move(windows, self.device))

    def state_dict(self) -> dict[str, Any]:
        """State of the rollouts and of the generator of the windows."""
        return {**super().state_dict(), "windows": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._generator.set_state(state["windows"])
        return super().load_state_dict(state)
