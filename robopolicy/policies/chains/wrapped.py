"""A generative head with exploration around it: what the on-policy fine-tuners sample and score.

The wrapper is for training only. `act(deterministic=True)`, `decode`, `field` and `imitation_loss` are the head's, and
so is what gets deployed.
"""

from __future__ import annotations

from torch import Tensor

from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import Randomness


class WrappedHead(Policy):
    """Base of such wrappers; subclasses add `sample` and `decisions`."""

    def __init__(self, head: GenerativePolicy) -> None:
        """Wrap `head`, which is shared, not copied; its parameters keep the prefix `head.`."""
        super().__init__()
        self.spec = head.spec
        self.head = head

    @property
    def network_calls(self) -> int:
        """Those of the head; what explores is not deployed."""
        return self.head.network_calls

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The plain head when `deterministic`, else an exploring sample."""
        if deterministic:
            return self.head.act(obs, deterministic=True, generator=generator)
        return self.sample(obs, generator=generator).chunk

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Loss of the wrapped head."""
        return self.head.imitation_loss(obs, chunk, weight, mask=mask, generator=generator)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk of the wrapped head."""
        return self.head.decode(obs, noise)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity of the wrapped head."""
        return self.head.field(obs, x, t)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers of the wrapped head."""
        self.head.fit_normalizer(statistics)

    def set_progress(self, progress: float) -> None:
        """That of the wrapped head."""
        self.head.set_progress(progress)
