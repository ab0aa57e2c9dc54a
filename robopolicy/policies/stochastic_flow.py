"""A flow policy whose Euler steps carry learned Gaussian noise, so that its chain has a density (ReinFlow, S078).

`x_{k+1} ~ N(clip(x_k + v(x_k, k/K) / K), sigma(obs, k/K)^2)`, all in normalised units and over the whole chunk (also
the steps that are not executed, as in the paper). `transition` is the one function behind sampling and scoring, and
both index the same left grid {0, 1/K, ..., (K-1)/K}; the public code of ReinFlow samples on another grid than it
scores on. The noise network is used in training only: `act(deterministic=True)` is the plain flow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.mlp import MLP
from robopolicy.nets.normalizer import Statistics
from robopolicy.nets.time import SinusoidalEmbedding
from robopolicy.policies.base import DecisionOutput, Info, Observation, Policy, Record, Sample
from robopolicy.policies.density import normal_entropy, normal_log_density
from robopolicy.policies.flow import FlowPolicy
from robopolicy.policies.noise import Randomness, normal

SCHEDULES = ("constant", "learned", "learned_decay")
HOLD = 0.35  # learned_decay keeps the upper bound for this share of training, then lowers it along a cosine
FINAL_SHARE = 0.7  # ... to 0.3 std_min + 0.7 std_max


@dataclass(frozen=True)
class NoiseConfig:
    """Injected noise: bounds in normalised action units, and the network that chooses between them."""

    schedule: str = "learned"  # constant (std_max everywhere) | learned | learned_decay (shrinking upper bound)
    std_min: float = 0.08
    std_max: float = 0.16
    hidden: tuple[int, ...] = (64, 64)
    time_dim: int = 16  # width of the (parameter-free) time embedding; 0 makes the noise independent of the step
    noise_clip: float = 3.0  # draws beyond this many standard deviations are cut; 0 disables

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise unknown_name("noise schedule", self.schedule, SCHEDULES)
        if not 0 < self.std_min <= self.std_max:
            raise UserError(f"Noise needs 0 < std_min <= std_max, got {self.std_min} and {self.std_max}.")
        if self.noise_clip < 0:
            raise UserError(f"noise_clip must not be negative, got {self.noise_clip}.")


class NoiseNet(nn.Module):
    """Log standard deviation `(B, H * A)` of each transition, between fixed bounds, from features and time."""

    log_std_max: Tensor

    def __init__(self, config: NoiseConfig, feature_dim: int, size: int) -> None:
        super().__init__()
        self.config = config
        self.time = SinusoidalEmbedding(config.time_dim) if config.time_dim else None
        self.body = MLP(feature_dim + config.time_dim, config.hidden, size, activation="tanh")
        self.register_buffer("log_std_max", torch.tensor(math.log(config.std_max)))
        self.requires_grad_(config.schedule != "constant")

    def forward(self, features: Tensor, t: Tensor) -> Tensor:
        """Interpolate the log-variance between its bounds by `(tanh(y) + 1) / 2`."""
        if self.time is not None:
            features = torch.cat([features, self.time(t)], -1)
        y = self.body(features)
        if self.config.schedule == "constant":
            return self.log_std_max.expand_as(y)
        low = math.log(self.config.std_min)
        return low + (self.log_std_max - low) * (y.tanh() + 1) / 2

    def set_progress(self, progress: float) -> None:
        """Move the upper bound of `learned_decay` to its place at `progress` in [0, 1]."""
        if self.config.schedule != "learned_decay":
            return
        elapsed = min(max(progress - HOLD, 0.0) / (1 - HOLD), 1.0)
        share = 0.5 * (1 + math.cos(math.pi * elapsed))  # 1 -> 0
        final = (1 - FINAL_SHARE) * self.config.std_min + FINAL_SHARE * self.config.std_max
        self.log_std_max.fill_(math.log(final + (self.config.std_max - final) * share))


class StochasticFlow(Policy):
    """Wraps a `FlowPolicy` for policy gradients; T = K decisions per chunk, verbs `sample` and `decisions`."""

    name: ClassVar[str] = "stochastic_flow"

    def __init__(self, flow: FlowPolicy, config: NoiseConfig) -> None:
        """Wrap `flow`, which is shared, not copied; its parameters keep the prefix `flow.`, the noise's `noise.`."""
        super().__init__()
        self.config = config
        self.spec = flow.spec
        self.flow = flow
        size = self.spec.horizon * self.spec.action_dim
        self.noise = NoiseNet(config, self.spec.obs_horizon * flow.encoder.feature_dim, size)

    @property
    def network_calls(self) -> int:
        """K velocity evaluations; the noise network is not deployed."""
        return self.flow.network_calls

    def transition(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation `(B, H, A)` of the next iterate after `x` `(B, H, A)` at time `t` `(B,)`."""
        mean = self.flow.euler_step(features, x, t)
        return mean, self.noise(features.flatten(1), t).view_as(mean)

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk; the record holds the chain `(B, K + 1, H, A)` from the initial noise to the normalised chunk.

        The last iterate is scored as drawn and executed within the flow's action bounds. The density of the initial
        noise does not depend on any parameter and is left out.
        """
        features = self.flow.encode(obs)
        batch = features.shape[0]
        shape = (batch, self.spec.horizon, self.spec.action_dim)
        x = normal(shape, generator, features.device)
        chain, logp = [x], []
        for t in self.flow.grid:
            mean, log_std = self.transition(features, x, t.expand(batch))
            noise = normal(shape, generator, features.device)
            if self.config.noise_clip:
                noise = noise.clamp(-self.config.noise_clip, self.config.noise_clip)
            x = mean + log_std.exp() * noise
            chain.append(x)
            logp.append(_chain_logp(x, mean, log_std))
        chunk = self.flow.action_normalizer.denormalize(self.flow.clip(x))
        return Sample(chunk, {"chain": torch.stack(chain, 1)}, torch.stack(logp, 1))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, K)` of each transition, summed over the H * A dimensions.

        One network call scores all B * K transitions.
        """
        chain = record["chain"]
        batch, steps = chain.shape[0], chain.shape[1] - 1
        features = self.flow.encode(obs).repeat_interleave(steps, 0)  # (B * K, To, F)
        t = self.flow.grid.repeat(batch)
        mean, log_std = self.transition(features, chain[:, :-1].flatten(0, 1), t)
        logp = _chain_logp(chain[:, 1:].flatten(0, 1), mean, log_std)
        return DecisionOutput(logp.view(batch, steps), normal_entropy(log_std).flatten(1).sum(1).view(batch, steps))

    def set_progress(self, progress: float) -> None:
        """Advance the noise schedule; call it between iterations only."""
        self.noise.set_progress(progress)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The plain flow when `deterministic`, else a noisy chain."""
        if deterministic:
            return self.flow.act(obs, deterministic=True, generator=generator)
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
        """Loss of the wrapped flow."""
        return self.flow.imitation_loss(obs, chunk, weight, mask=mask, generator=generator)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk of the wrapped flow."""
        return self.flow.decode(obs, noise)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity of the wrapped flow."""
        return self.flow.field(obs, x, t)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers of the wrapped flow."""
        self.flow.fit_normalizer(statistics)


def _chain_logp(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return normal_log_density(x, mean, log_std).flatten(1).sum(1)
