"""Deterministic policy of Symphony: actions of bounded strength with smooth, bounded noise (Ishuov et al. 2025).

The network outputs a direction A, a strength S and a tightness K per action, `tanh(out / 2)` each, with S and K
positive. The executed action is `tanh(S A + n)`. The noise n has a fixed standard deviation of 1 / e and never exceeds
1, so that it dominates weak actions but not strong ones. Only `algorithm=symphony` learns S and K, through a penalty on
both.

Use it for learning on hardware that requires smooth motion. It has no density, so it does not support algorithms that
need log-probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import PositiveInt
from robopolicy.nets.backbone import BackboneConfig, make_direct
from robopolicy.policies.base import Info, Observation, PolicySpec, Sample, chunk_mean
from robopolicy.policies.heads.explicit import ExplicitConfig, ExplicitPolicy
from robopolicy.policies.noise import Randomness, normal

EDGE = 1e-3  # minimum distance of strength and tightness to 0 and 1


@dataclass(frozen=True)
class SymphonyPolicyConfig(BackboneConfig, ExplicitConfig):
    """Architecture of a `SymphonyPolicy`."""

    hidden: tuple[PositiveInt, ...] = (256, 256)


class SymphonyPolicy(ExplicitPolicy):
    """Methods `act`, `sample` (without decisions) and `imitation_loss`."""

    name: ClassVar[str] = "swaddled"
    config_class = SymphonyPolicyConfig
    config: SymphonyPolicyConfig

    def __init__(self, config: SymphonyPolicyConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        self.actor = make_direct(
            config,
            channels=3 * spec.action_dim,
            horizon=spec.horizon,
            feature_dim=self.feature_dim,
            obs_horizon=spec.obs_horizon,
        )

    def parameters_of(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Direction, strength and tightness `(B, H, A)` for features `(B, To, F)`."""
        direction, strength, tightness = (self.actor(features) / 2).tanh().chunk(3, -1)
        return direction, strength.abs().clamp(EDGE, 1 - EDGE), tightness.abs().clamp(EDGE, 1 - EDGE)

    def rsample(self, obs: Observation, *, generator: Randomness = None) -> tuple[Tensor, Tensor, Tensor]:
        """Chunk `(B, H, A)` with noise, and strength and tightness `(B, H, A)`; differentiable."""
        direction, strength, tightness = self.parameters_of(self.features(obs))
        noise = normal(direction.shape, generator, direction.device).clamp(-math.e, math.e) / math.e
        return self._to_chunk(strength * direction + noise), strength, tightness

    def mode(self, obs: Observation) -> Tensor:
        """Chunk `(B, H, A)` without noise; differentiable."""
        direction, strength, _ = self.parameters_of(self.features(obs))
        return self._to_chunk(strength * direction)

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The chunk without noise (`deterministic`) or with it."""
        return self.mode(obs) if deterministic else self.rsample(obs, generator=generator)[0]

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk with noise."""
        return Sample.unscored(self.act(obs, generator=generator))

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Squared error `(B,)` of the chunk without noise, averaged over the valid steps and dimensions."""
        direction, strength, _ = self.parameters_of(self.encode_for_training(obs, generator))
        error = ((strength * direction).tanh() - self.action_normalizer.normalize(chunk)).square()
        loss = chunk_mean(error.mean(-1), mask)
        return (loss if weight is None else loss * weight), {"mse": loss.detach().mean()}

    def _to_chunk(self, raw: Tensor) -> Tensor:
        return self.action_normalizer.denormalize(raw.tanh())
