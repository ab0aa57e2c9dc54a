"""Generative head whose endpoint is perturbed by Gaussian noise of learned size, scored by velocities (PolicyFlow).

An action is `a = phi(z) + n` with `z ~ N(0, I)`, the deterministic sampler phi of the head and `n ~ N(0, sigma^2)`.
When the velocity changes by dv, the endpoint moves by about dv at any point of the line from z to the old endpoint, so
the new density of the recorded `a` is approximated by `N(a - phi_old(z); dv, sigma^2)`, without scoring or
differentiating an integration.

The record holds z, endpoint and action in normalised units; `complete` adds the times and old velocities of the
densities. They are fixed during an iteration, so the ratio of fresh data is exactly 1. The noise is for training only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtMost, Positive, Validated
from robopolicy.policies.base import DecisionOutput, Observation, Record, Sample
from robopolicy.policies.density import bounded, normal_entropy, normal_log_density
from robopolicy.policies.exploration.chain import HeadWrapper
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import interpolate


@dataclass(frozen=True)
class EndpointNoiseConfig(Validated):
    """Noise on the endpoint, in normalised action units."""

    std_init: Annotated[Positive, AtMost("std_max")] = 0.1  # first standard deviation; published: 1, from scratch
    std_min: Annotated[Positive, AtMost("std_init")] = 0.02  # lower bound; published bounds: exp(-5), exp(2)
    std_max: Positive = 1.0


class EndpointNoisePolicy(HeadWrapper):
    """A head with learned Gaussian noise on its chunk; one decision per chunk, over its executed steps."""

    name = "perturbed_flow"
    scored_by_sample = False

    def __init__(self, head: GenerativePolicy, config: EndpointNoiseConfig, *, times: int = 1) -> None:
        """Wrap `head`, which is shared; the change of velocity is evaluated at `times` (M) points of the path."""
        super().__init__(head)
        self.config = config
        self.times = times
        self.raw_log_std = nn.Parameter(torch.full((self.spec.action_dim,), math.log(config.std_init)))

    @property
    def log_std(self) -> Tensor:
        """Log standard deviation `(A,)` of the noise, within its bounds."""
        return bounded(self.raw_log_std, math.log(self.config.std_min), math.log(self.config.std_max))

    def log_density(self, offset: Tensor, mean: Tensor) -> Tensor:
        """Log-density `(...)` of offsets from the old endpoint, summed over the executed steps `(..., Ta, A)`."""
        return normal_log_density(offset, mean, self.log_std).flatten(-2).sum(-1)

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Integrate from fresh noise, perturb the endpoint and clip the result to the action bounds."""
        head = self.head
        features = head.encode(obs)
        noise = head.draw_noise(len(features), generator, features.device)
        endpoint = head.action_normalizer.normalize(head.integrate(features, noise))
        action = endpoint + self.log_std.exp() * normal(endpoint.shape, generator, endpoint.device)
        offset = (action - endpoint)[:, : self.spec.action_horizon]
        record = {"noise": noise, "endpoint": endpoint, "action": action}
        logp = self.log_density(offset, torch.zeros_like(offset)).unsqueeze(1)
        return Sample(head.action_normalizer.denormalize(head.clip(action)), record, logp)

    @torch.no_grad()
    def complete(self, obs: Observation, record: Record, generator: torch.Generator) -> Record:
        """Add M times `(B, M)`, from the sampler grid and its midpoints, and the velocity `(B, M, H, A)` there."""
        noise, halves = record["noise"], 2 * self.head.config.steps
        index = torch.randint(halves, (len(noise), self.times), generator=generator, device=generator.device)
        record = record | {"t": (index / halves).to(noise.device)}
        return record | {"velocity": self.velocities(obs, record)}

    def velocities(self, obs: Observation, record: Record) -> Tensor:
        """Velocity `(B, M, H, A)` at the recorded times on the line from noise to endpoint."""
        t = record["t"]
        features = self.head.encode(obs).repeat_interleave(t.shape[1], 0)
        return self.head.velocity(features, self.points(record).flatten(0, 1), t.flatten()).unflatten(0, t.shape)

    @staticmethod
    def points(record: Record) -> Tensor:
        """Recorded points `(B, M, H, A)` of the line from noise to endpoint."""
        t = record["t"][..., None, None]
        return interpolate(record["noise"].unsqueeze(1), record["endpoint"].unsqueeze(1), t)

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-density `(B, 1)` of the action, with the density averaged over the times, and entropy of the noise."""
        return self.score(record, self.velocities(obs, record))

    def score(self, record: Record, velocity: Tensor) -> DecisionOutput:
        """Compute `decisions` from the current `velocity` `(B, M, H, A)` at the recorded points."""
        executed = slice(self.spec.action_horizon)
        offset = (record["action"] - record["endpoint"])[:, None, executed]
        change = (velocity - record["velocity"])[:, :, executed]
        logp = self.log_density(offset, change)  # (B, M)
        # Relative to the unchanged endpoint, so that rounding does not grow with the number of dimensions.
        unchanged = self.log_density(offset, torch.zeros_like(offset))  # (B, 1)
        mean = unchanged + (logp - unchanged).logsumexp(1, keepdim=True) - math.log(logp.shape[1])
        entropy = self.spec.action_horizon * normal_entropy(self.log_std).sum()
        return DecisionOutput(mean, entropy.expand_as(mean))
