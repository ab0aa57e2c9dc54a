"""Gaussian policy, the head of PPO and related methods; by default the network of Stable-Baselines3's PPO.

Densities refer to the normalised chunk (affine action scaling only shifts log-probabilities by a constant). With
`squash` the chunk is tanh of the Gaussian and the density includes the change of variables; the record holds the value
before tanh, so scoring does not invert it.

Use it for control from scratch. Demonstrations with several solutions need a mixture, tokens or a flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.constraints import AtMost, Finite, PositiveInt
from robopolicy.errors import unknown_name
from robopolicy.nets.backbone import BackboneConfig, make_direct
from robopolicy.policies.base import DecisionOutput, Info, Observation, PolicySpec, Record, Sample, chunk_mean
from robopolicy.policies.density import log_tanh_slope, normal_entropy, normal_log_density, sample_squashed
from robopolicy.policies.heads.explicit import ExplicitConfig, ExplicitPolicy
from robopolicy.policies.noise import Randomness, normal, repeated

IMITATION_LOSSES = ("nll", "mse")


@dataclass(frozen=True)
class GaussianConfig(BackboneConfig, ExplicitConfig):
    """Architecture of a `GaussianPolicy`."""

    hidden: tuple[PositiveInt, ...] = (64, 64)
    activation: str = "tanh"
    orthogonal_init: bool = True  # plain layers only: gain sqrt(2) inside and 0.01 at the output, zero biases
    state_dependent_std: bool = False  # predict the log standard deviation instead of learning one vector
    log_std_init: Finite = 0.0  # initial log standard deviation, normalised units
    log_std_min: Annotated[Finite, AtMost("log_std_max", exclusive=True)] = -5.0  # bounds of a predicted logarithm
    log_std_max: Finite = 2.0
    log_std_tanh: bool = False  # reach these bounds smoothly by tanh instead of a clamp
    squash: bool = False  # tanh; the action normaliser then maps [-1, 1] to the action bounds
    imitation: str = "nll"  # nll | mse
    action_normalization: str = "identity"  # minmax | meanstd | identity; minmax for squashed policies

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitation not in IMITATION_LOSSES:
            raise unknown_name("imitation loss", self.imitation, IMITATION_LOSSES)


class GaussianPolicy(ExplicitPolicy):
    """Diagonal Gaussian over the chunk; one decision; methods `act`, `sample`, `decisions`, `imitation_loss`."""

    name: ClassVar[str] = "gaussian"
    config_class = GaussianConfig
    config: GaussianConfig

    def __init__(self, config: GaussianConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        self.actor = make_direct(
            config,
            channels=spec.action_dim * (2 if config.state_dependent_std else 1),
            horizon=spec.horizon,
            feature_dim=self.feature_dim,
            obs_horizon=spec.obs_horizon,
            orthogonal_gain=0.01 if config.orthogonal_init else None,
        )
        if not config.state_dependent_std:
            self.log_std = nn.Parameter(torch.full((spec.horizon, spec.action_dim), config.log_std_init))

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the mode (`deterministic`) or a sample."""
        with torch.no_grad():
            mean, log_std = self.distribution(obs)
            raw = mean if deterministic else mean + log_std.exp() * normal(mean.shape, generator, mean.device)
            return self._to_chunk(raw)

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Sample from one distribution per observation."""
        mean, log_std = self.distribution(obs)
        shape = (count * len(mean), *mean.shape[1:])
        noise = normal(shape, repeated(generator, count), mean.device).unflatten(0, (-1, count))
        raw = mean[:, None] + log_std.exp().expand_as(mean)[:, None] * noise
        return self._to_chunk(raw.flatten(0, 1)).unflatten(0, (-1, count))

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample a chunk; the record holds it before tanh and in normalised units."""
        mean, log_std = self.distribution(obs)
        raw = mean + log_std.exp() * normal(mean.shape, generator, mean.device)
        return Sample(self._to_chunk(raw), {"raw": raw}, self._logp(raw, mean, log_std))

    def rsample(self, obs: Observation, *, generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """Reparameterised chunk `(B, H, A)` and the log-probability `(B,)` of its executed part, differentiable."""
        mean, log_std = self.distribution(obs)
        return self.rsample_from(mean, log_std, normal(mean.shape, generator, mean.device))

    def rsample_from(self, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Result of `rsample` for standard normal `noise` `(B, H, A)`, given `distribution`."""
        if self.config.squash:
            draw, density = sample_squashed(mean, log_std, noise)
        else:
            draw = mean + log_std.exp() * noise
            density = normal_log_density(draw, mean, log_std)
        chunk = self.action_normalizer.denormalize(draw)
        return chunk, self._executed(density).sum((1, 2))

    def mode(self, obs: Observation) -> Tensor:
        """Most probable chunk before tanh, converted to env units `(B, H, A)`; differentiable."""
        return self._to_chunk(self.distribution(obs)[0])

    def log_density(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Log-probability `(B,)` of the executed part of a given `chunk` `(B, H, A)`, consistent with `rsample`."""
        return self.raw_density(obs, self._to_raw(chunk))

    def raw_density(self, obs: Observation, raw: Tensor) -> Tensor:
        """Like `log_density`, for a chunk in normalised units before tanh `(B, H, A)`; exact under saturation."""
        mean, log_std = self.distribution(obs)
        return self._executed(self._log_density(raw, mean, log_std)).sum((1, 2))

    def _executed(self, density: Tensor) -> Tensor:
        """The executed part `(B, Ta, A)` of `(B, H, A)`."""
        whole = self.spec.action_horizon == self.spec.horizon  # the gradient of a slice costs two kernels
        return density if whole else density[:, : self.spec.action_horizon]

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, 1)`.

        The entropy of a squashed policy has no closed form: it is estimated at the recorded value, with the gradient of
        a reparameterised sample.
        """
        raw = record["raw"]
        mean, log_std = self.distribution(obs)
        logp = self._logp(raw, mean, log_std)
        entropy = normal_entropy(log_std).flatten(-2).sum(-1, keepdim=True).expand_as(logp)
        if self.config.squash:
            std = log_std.exp()
            draw = mean + std * ((raw - mean) / std).detach()
            entropy = entropy + log_tanh_slope(draw).flatten(1).sum(1, keepdim=True)
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
        mean, log_std = self._head(self.encode_for_training(obs, generator))
        target = self.action_normalizer.normalize(chunk)
        mode = mean.tanh() if self.config.squash else mean
        error = (mode - target).square()
        if self.config.imitation == "nll":
            loss = chunk_mean(-self._log_density(self._to_raw(chunk), mean, log_std).mean(-1), mask)
        else:
            loss = chunk_mean(error.mean(-1), mask)
        info = {"mse": chunk_mean(error.detach().mean(-1), mask).mean()}
        return (loss if weight is None else loss * weight), info

    def distribution(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before tanh, in normalised units; broadcast to `(B, H, A)`."""
        return self._head(self.features(obs))

    def _head(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `(B, H, A)` and log standard deviation, `(B, H, A)` or `(H, A)`, for all methods."""
        output = self.actor(features)  # (B, H, A) or (B, H, 2 A)
        if not self.config.state_dependent_std:
            return output, self.log_std
        mean, log_std = output.chunk(2, -1)
        low, high = self.config.log_std_min, self.config.log_std_max
        log_std = log_std + self.config.log_std_init if self.config.log_std_init else log_std
        if self.config.log_std_tanh:
            return mean, low + (high - low) / 2 * (1 + log_std.tanh())
        return mean, F.hardtanh(log_std, low, high)  # a clamp in fewer kernels

    def _log_density(self, raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        density = normal_log_density(raw, mean, log_std)
        return density - log_tanh_slope(raw) if self.config.squash else density

    def _logp(self, raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        return self._log_density(raw, mean, log_std).flatten(1).sum(1, keepdim=True)

    def _to_raw(self, chunk: Tensor) -> Tensor:
        """Inverse of `_to_chunk`; saturated values are clamped."""
        target = self.action_normalizer.normalize(chunk)
        return target.clamp(-1 + 1e-6, 1 - 1e-6).atanh() if self.config.squash else target

    def _to_chunk(self, raw: Tensor) -> Tensor:
        return self.action_normalizer.denormalize(raw.tanh() if self.config.squash else raw)
