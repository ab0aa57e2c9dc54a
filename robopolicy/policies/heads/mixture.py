"""Mixture of Gaussian experts with a learned router: several solutions with an exact density (PMOE, Ren et al. 2021).

`p(chunk | obs) = sum_m w_m(obs) N(chunk; mean_m(obs), std_m(obs)^2)`: the router selects one expert for the whole
chunk, so that a chunk follows one solution. Densities refer to the normalised chunk; with `squash` the chunk is tanh of
the mixture.

Use it for few, distinct demonstrations or optima (left or right of an obstacle, one of two grasps), with `bc`, with
`ppo`, which scores the exact mixture including the router, or with `pmoe`, the off-policy training of the paper. For
many or connected modes use a flow or diffusion policy; for one mode, a Gaussian is faster.

Deviations from the paper: experts may have any backbone, and their initial means differ (`mean_spread`), as equal
experts would have equal gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtMost, Finite, NonNegative, PositiveInt
from robopolicy.nets.backbone import BackboneConfig, make_direct
from robopolicy.nets.mlp import MLP
from robopolicy.policies.base import DecisionOutput, Info, Observation, PolicySpec, Record, Sample
from robopolicy.policies.density import log_tanh_slope, normal_log_density, sample_category
from robopolicy.policies.heads.explicit import ExplicitConfig, ExplicitPolicy
from robopolicy.policies.noise import Randomness, normal, repeated, uniform


@dataclass(frozen=True)
class MixtureConfig(BackboneConfig, ExplicitConfig):
    """Architecture of a `MixturePolicy`."""

    hidden: tuple[PositiveInt, ...] = (256, 256)
    experts: PositiveInt = 5  # M
    router_hidden: tuple[PositiveInt, ...] = (64, 64)  # hidden layers of the router; () is linear, as in PMOE
    orthogonal_init: bool = True  # plain layers only: gain sqrt(2) inside and 0.01 at the output, zero biases
    mean_spread: NonNegative = 0.5  # half-width of the uniform distribution of the experts' initial means
    state_dependent_std: bool = False  # predict the log standard deviations; overfits small datasets with sharp experts
    log_std_init: Finite = -1.0  # initial log standard deviation of every expert, normalised units
    log_std_min: Annotated[Finite, AtMost("log_std_max", exclusive=True)] = -3.0  # bounds of a predicted logarithm
    log_std_max: Finite = 2.0
    squash: bool = False  # tanh; the action normaliser then maps [-1, 1] to the action bounds


class Experts(NamedTuple):
    """Mixture at B observations."""

    log_weight: Tensor  # (B, M) log-probabilities of the router
    mean: Tensor  # (B, M, H, A) before tanh
    log_std: Tensor  # (B, M, H, A)

    def sample_many(self, noise: Tensor) -> Tensor:
        """Sample one value per expert from standard normal `noise` `(B, M, H, A)`."""
        return self.mean + self.log_std.exp() * noise

    def log_densities(self, raw: Tensor) -> Tensor:
        """Log-density of every element of `raw` `(B, H, A)` under each expert: `(B, M, H, A)`."""
        return normal_log_density(raw.unsqueeze(1), self.mean, self.log_std)

    def logp(self, raw: Tensor) -> Tensor:
        """Log-density `(B,)` of the mixture at `raw` `(B, H, A)`."""
        return (self.log_weight + self.log_densities(raw).flatten(2).sum(2)).logsumexp(1)

    def entropy(self, noise: Tensor) -> Tensor:
        """Unbiased estimate `(B,)` of the entropy and its gradient, from one sample per expert.

        `- sum_m w_m log p(x_m)` with `x_m` reparameterised is exact in the router, so unlike the score of a single
        sample it gives the router a gradient that separates the experts.
        """
        samples = self.sample_many(noise)  # (B, M, H, A)
        # [b, i, m]: sample i under expert m
        pairs = normal_log_density(samples.unsqueeze(2), self.mean.unsqueeze(1), self.log_std.unsqueeze(1))
        logp = (self.log_weight.unsqueeze(1) + pairs.flatten(3).sum(3)).logsumexp(2)
        return -(self.log_weight.exp() * logp).sum(1)


class MixturePolicy(ExplicitPolicy):
    """Mixture density over the chunk; one decision; methods `act`, `sample`, `decisions`, `imitation_loss`."""

    name: ClassVar[str] = "mixture"
    config_class = MixtureConfig
    config: MixtureConfig

    def __init__(self, config: MixtureConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        per_action = config.experts * spec.action_dim
        self.actor = make_direct(
            config,
            channels=per_action * (2 if config.state_dependent_std else 1),
            horizon=spec.horizon,
            feature_dim=self.feature_dim,
            obs_horizon=spec.obs_horizon,
            orthogonal_gain=0.01 if config.orthogonal_init else None,
        )
        self.router = MLP(
            spec.obs_horizon * self.feature_dim,
            config.router_hidden,
            config.experts,
            activation=config.activation,
            orthogonal_gain=0.01 if config.orthogonal_init else None,
        )
        centres = torch.empty(config.experts, 1, spec.action_dim)
        self.centres = nn.Parameter(centres.uniform_(-config.mean_spread, config.mean_spread))
        if not config.state_dependent_std:
            shape = (config.experts, spec.horizon, spec.action_dim)
            self.log_std = nn.Parameter(torch.full(shape, config.log_std_init))

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the mean of the most probable expert (`deterministic`) or a sample."""
        if not deterministic:
            return self.sample(obs, generator=generator).chunk
        with torch.no_grad():
            experts = self.experts(self.features(obs))
            return self._to_chunk(_pick(experts.mean, experts.log_weight.argmax(1)))

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Sample from features that are computed once."""
        experts = self.experts(self.features(obs).repeat_interleave(count, 0))
        return self._to_chunk(_draw(experts, repeated(generator, count))[0]).unflatten(0, (-1, count))

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample a chunk; the record holds it before tanh and the noise of all experts, for the entropy."""
        experts = self.experts(self.features(obs))
        raw, noise = _draw(experts, generator)
        return Sample(self._to_chunk(raw), {"raw": raw, "noise": noise}, self._logp(experts, raw))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability of the recorded chunk and an estimate of the entropy, `(B, 1)` each."""
        experts = self.experts(self.features(obs))
        entropy = experts.entropy(record["noise"])
        if self.config.squash:
            slope = log_tanh_slope(experts.sample_many(record["noise"])).flatten(2).sum(2)  # (B, M)
            entropy = entropy + (experts.log_weight.exp() * slope).sum(1)
        return DecisionOutput(self._logp(experts, record["raw"]), entropy.unsqueeze(1))

    def rsample_experts(self, obs: Observation, *, generator: Randomness = None) -> tuple[Tensor, Tensor, Tensor]:
        """Reparameterised chunks of all experts `(B, M, H, A)`, their log-densities and the router; differentiable.

        The last two are `(B, M)`: log-density of the executed actions under the expert, and router log-probabilities.
        """
        experts = self.experts(self.features(obs))
        raw = experts.sample_many(normal(experts.mean.shape, generator, experts.mean.device))
        density = normal_log_density(raw, experts.mean, experts.log_std)
        if self.config.squash:
            density = density - log_tanh_slope(raw)
        return self._to_chunk(raw), density[:, :, : self.spec.action_horizon].flatten(2).sum(2), experts.log_weight

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Negative log-likelihood `(B,)` of the valid steps, per step and dimension; padded steps have no effect."""
        experts = self.experts(self.encode_for_training(obs, generator))
        target = self.action_normalizer.normalize(chunk)
        raw = target.clamp(-1 + 1e-6, 1 - 1e-6).atanh() if self.config.squash else target
        density = experts.log_densities(raw)  # (B, M, H, A)
        if self.config.squash:
            density = density - log_tanh_slope(raw).unsqueeze(1)
        valid = torch.ones_like(raw[..., 0]) if mask is None else mask.to(raw.dtype)  # (B, H)
        joint = experts.log_weight + (density.sum(3) * valid.unsqueeze(1)).sum(2)  # (B, M)
        count = valid.sum(1) * self.spec.action_dim
        loss = -joint.logsumexp(1) / count.clamp(min=1) * (count > 0)
        info = {
            "nll": loss.detach().mean(),
            "router_entropy": -(experts.log_weight.exp() * experts.log_weight).sum(1).detach().mean(),
        }
        return (loss if weight is None else loss * weight), info

    def experts(self, features: Tensor) -> Experts:
        """Mixture at features `(B, To, F)`, for sampling and scoring."""
        config = self.config
        log_weight = self.router(features.flatten(1)).float().log_softmax(1)
        output = self.actor(features).unflatten(2, (config.experts, -1)).transpose(1, 2)  # (B, M, H, A or 2 A)
        if not config.state_dependent_std:
            mean = output + self.centres
            return Experts(log_weight, mean, self.log_std.expand_as(mean))
        mean, log_std = output.chunk(2, -1)
        log_std = (log_std + config.log_std_init).clamp(config.log_std_min, config.log_std_max)
        return Experts(log_weight, mean + self.centres, log_std)

    def _logp(self, experts: Experts, raw: Tensor) -> Tensor:
        logp = experts.logp(raw)
        return (logp - log_tanh_slope(raw).flatten(1).sum(1) if self.config.squash else logp).unsqueeze(1)

    def _to_chunk(self, raw: Tensor) -> Tensor:
        return self.action_normalizer.denormalize(raw.tanh() if self.config.squash else raw)


def _draw(experts: Experts, generator: Randomness) -> tuple[Tensor, Tensor]:
    """Sample a chunk before tanh `(B, H, A)` of one expert; also return the noise `(B, M, H, A)` of all experts."""
    noise = normal(experts.mean.shape, generator, experts.mean.device)
    expert = sample_category(experts.log_weight, uniform((len(noise), 1), generator, noise.device).squeeze(1))
    return _pick(experts.sample_many(noise), expert), noise


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Select `values[b, index[b]]` from `(B, M, ...)`."""
    return values[torch.arange(len(values), device=values.device), index]
