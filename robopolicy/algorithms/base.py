"""The algorithm contract: `update` on experience, `act` to explore, `deployable` to evaluate and export.

An algorithm never imports a logger, a simulator or the command line. `experience` names what its `update` wants:
"dataset" (a `ChunkBatch`), "rollout" (a `Rollout`); the training loop provides it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

Metrics = dict[str, float]


class Algorithm(ABC):
    """Base class of every algorithm; constructed as `Algorithm(config, policy, total_updates=n)`."""

    name: ClassVar[str]  # key in `robopolicy.algorithms.ALGORITHMS`
    experience: ClassVar[str]  # "dataset" | "rollout"
    policy: Policy  # the trainable policy, exploration included
    step_discount: float = 1.0  # discount per control step inside a chunk, for `ChunkedSim(gamma=...)`

    @abstractmethod
    def update(self, batch: Any) -> Metrics:
        """Improve the policy from one batch of experience; returns scalars, keys such as `actor/loss`."""

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration."""
        return self.policy.sample(obs, generator=generator)

    def deployable(self) -> Policy:
        """The policy to evaluate and to put into a checkpoint (averaged weights, no exploration network)."""
        return self.policy

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that decides future updates: networks, optimisers, schedules, counters, running statistics."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
