"""Generative policy that starts its sampler from zero noise: one deterministic chunk per observation.

Zero is the mode of the noise, and its chunk succeeds more often than a random sample. Several solutions of a task are
reduced to one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.nested import WrappingPolicy, describe, rebuild


@dataclass(frozen=True)
class ZeroNoiseConfig:
    """The policy that starts from zero noise."""

    base: dict[str, Any] = field(default_factory=dict)  # description of the wrapped policy


class ZeroNoisePolicy(WrappingPolicy):
    """Methods of the wrapped policy; `act` decodes zeros."""

    name: ClassVar[str] = "zero_noise"
    config_class = ZeroNoiseConfig

    def __init__(self, config: ZeroNoiseConfig, spec: PolicySpec, base: Policy | None = None) -> None:
        """Wrap `base`, or a new policy of the description in `config`."""
        super().__init__()
        self.config = config
        self.spec = spec
        self.base = rebuild(config.base) if base is None else base

    @classmethod
    def wrap(cls, base: Policy) -> ZeroNoisePolicy:
        """Wrap `base`, which is shared, not copied."""
        return cls(ZeroNoiseConfig(describe(base)), base.spec, base)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Noise shape of the wrapped policy."""
        return self.base.noise_shape

    @property
    def nfe(self) -> int:
        """Evaluations of the wrapped policy."""
        return self.base.nfe

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk from zero noise, without randomness."""
        reference = next(iter(obs.values()))
        noise = torch.zeros(len(reference), *self.noise_shape, device=reference.device)
        with torch.no_grad():
            return self.base.decode(obs, noise)

    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Chunks of the wrapped policy from random noise, because zero noise has one chunk per observation."""
        if count == 1:
            return super().sample_many(obs, count, generator=generator)
        return self.base.sample_many(obs, count, generator=generator)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk of the wrapped policy for any noise."""
        return self.base.decode(obs, noise)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity of the wrapped policy."""
        return self.base.field(obs, x, t)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers of the wrapped policy."""
        self.base.fit_normalizer(statistics)


def without_zero_noise(policy: Policy) -> Policy:
    """Return the policy inside a `ZeroNoisePolicy`, which samples noise, or else `policy`."""
    return policy.base if isinstance(policy, ZeroNoisePolicy) else policy
