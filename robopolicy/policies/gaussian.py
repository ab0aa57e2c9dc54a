"""Gaussian policy, the head of PPO and its relatives; by default exactly the network of Stable-Baselines3's PPO.

The density is that of the normalised chunk (affine action scaling only shifts log-probabilities by a constant).
With `squash` the chunk is tanh of the Gaussian and the density includes the change of variables; the record keeps the
value before tanh, so scoring never inverts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.mlp import MLP
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import DecisionOutput, Info, Observation, Policy, PolicySpec, Record, Sample, chunk_mean
from robopolicy.policies.density import normal_entropy, normal_log_density
from robopolicy.policies.noise import Randomness, normal

IMITATION_LOSSES = ("nll", "mse")


@dataclass(frozen=True)
class GaussianConfig:
    """Architecture of a `GaussianPolicy`."""

    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    orthogonal_init: bool = True  # gain sqrt(2) inside and 0.01 at the output, zero biases
    state_dependent_std: bool = False  # predict the log standard deviation instead of learning one vector
    log_std_init: float = 0.0  # initial log standard deviation, normalised units
    log_std_min: float = -5.0  # bounds of a predicted log standard deviation
    log_std_max: float = 2.0
    squash: bool = False  # tanh; the action normaliser then maps [-1, 1] to the action bounds
    imitation: str = "nll"  # nll | mse
    normalization: str = "running"  # minmax | meanstd | running | identity
    action_normalization: str = "identity"  # minmax | meanstd | identity; minmax for squashed policies
    vision: VisionConfig = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        if self.imitation not in IMITATION_LOSSES:
            raise unknown_name("imitation loss", self.imitation, IMITATION_LOSSES)
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")
        if self.log_std_min >= self.log_std_max:
            raise UserError(f"log_std_min {self.log_std_min} must lie below log_std_max {self.log_std_max}.")


class GaussianPolicy(Policy):
    """Diagonal Gaussian over the chunk; one decision; verbs `act`, `sample`, `decisions`, `imitation_loss`."""

    name: ClassVar[str] = "gaussian"

    def __init__(self, config: GaussianConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.encoder = ObservationEncoder(spec.observation, normalization=config.normalization, vision=config.vision)
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)
        size = spec.horizon * spec.action_dim
        self.actor = MLP(
            spec.obs_horizon * self.encoder.feature_dim,
            config.hidden,
            size * (2 if config.state_dependent_std else 1),
            activation=config.activation,
            orthogonal_gain=0.01 if config.orthogonal_init else None,
        )
        if not config.state_dependent_std:
            self.log_std = nn.Parameter(torch.full((spec.horizon, spec.action_dim), config.log_std_init))

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers; for squashed policies pass the action bounds as `{"action": {"min", "max"}}`."""
        self.encoder.fit_normalizer(statistics)
        self.action_normalizer.fit_key(statistics, "action")

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The mode (`deterministic`) or a draw."""
        with torch.no_grad():
            mean, log_std = self._distribution(obs)
            raw = mean if deterministic else mean + log_std.exp() * normal(mean.shape, generator, mean.device)
            return self._to_chunk(raw)

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk; the record holds it before tanh and in normalised units."""
        mean, log_std = self._distribution(obs)
        raw = mean + log_std.exp() * normal(mean.shape, generator, mean.device)
        return Sample(self._to_chunk(raw), {"raw": raw}, self._logp(raw, mean, log_std))

    def rsample(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Reparameterised chunk `(B, H, A)` and its log-probability `(B,)`, both differentiable."""
        mean, log_std = self._distribution(obs)
        raw = mean + log_std.exp() * torch.randn_like(mean)
        return self._to_chunk(raw), self._logp(raw, mean, log_std).squeeze(1)

    @torch.no_grad()
    def sample_uniform(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Chunks uniform over the action bounds of a squashed policy, for the first steps of off-policy learning."""
        reference = next(iter(obs.values()))
        shape = (len(reference), self.spec.horizon, self.spec.action_dim)
        uniform = 2 * torch.special.ndtr(normal(shape, generator, reference.device)) - 1
        return Sample(self.action_normalizer.denormalize(uniform), {}, uniform.new_zeros(len(uniform), 0))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, 1)`.

        The entropy of a squashed policy has no closed form: it is estimated at the recorded value, through which the
        gradient flows as for a reparameterised draw.
        """
        raw = record["raw"]
        mean, log_std = self._distribution(obs)
        logp = self._logp(raw, mean, log_std)
        entropy = normal_entropy(log_std).flatten(-2).sum(-1, keepdim=True).expand_as(logp)
        if self.config.squash:
            std = log_std.exp()
            draw = mean + std * ((raw - mean) / std).detach()
            entropy = entropy + _log_tanh_slope(draw).flatten(1).sum(1, keepdim=True)
        return DecisionOutput(logp, entropy)

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Negative log-likelihood or squared error `(B,)`, averaged over the valid steps and dimensions."""
        crop_generator = generator if isinstance(generator, torch.Generator) else None
        mean, log_std = self._head(self.encoder(obs, augment=self.training, generator=crop_generator))
        target = self.action_normalizer.normalize(chunk)
        mode = mean.tanh() if self.config.squash else mean
        error = (mode - target).square()
        if self.config.imitation == "nll":
            raw = target.clamp(-1 + 1e-6, 1 - 1e-6).atanh() if self.config.squash else target
            loss = chunk_mean(-self._log_density(raw, mean, log_std).mean(-1), mask)
        else:
            loss = chunk_mean(error.mean(-1), mask)
        info = {"mse": chunk_mean(error.detach().mean(-1), mask).mean()}
        return (loss if weight is None else loss * weight), info

    def _distribution(self, obs: Observation) -> tuple[Tensor, Tensor]:
        return self._head(self.encoder(obs))

    def _head(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `(B, H, A)` and log standard deviation, `(B, H, A)` or `(H, A)`: the one function behind every verb."""
        output = self.actor(features.flatten(1))
        shape = (-1, self.spec.horizon, self.spec.action_dim)
        if not self.config.state_dependent_std:
            return output.view(shape), self.log_std
        mean, log_std = output.chunk(2, -1)
        log_std = (log_std + self.config.log_std_init).clamp(self.config.log_std_min, self.config.log_std_max)
        return mean.view(shape), log_std.view(shape)

    def _log_density(self, raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        density = normal_log_density(raw, mean, log_std)
        return density - _log_tanh_slope(raw) if self.config.squash else density

    def _logp(self, raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        return self._log_density(raw, mean, log_std).flatten(1).sum(1, keepdim=True)

    def _to_chunk(self, raw: Tensor) -> Tensor:
        return self.action_normalizer.denormalize(raw.tanh() if self.config.squash else raw)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """`log(1 - tanh(u)^2)` without cancellation."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))
