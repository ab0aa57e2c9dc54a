"""Flow policy whose Euler steps have learned Gaussian noise, so that its chain has a density (ReinFlow, Zhang 2025).

`x_{k+1} ~ N(clip(x_k + v(x_k, k/K) / K), sigma(obs, k/K)^2)`, in normalised units and over the whole chunk, including
steps that are not executed, as in the paper. Sampling and scoring index the same left grid {0, 1/K, ..., (K-1)/K}; the
public code of ReinFlow uses different grids for them. The noise network is used in training only. Heads with other than
Euler steps (shortcut, MeanFlow) keep their own mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtMost, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.mlp import MLP
from robopolicy.nets.time import SinusoidalEmbedding
from robopolicy.policies.density import normal_entropy, normal_log_density
from robopolicy.policies.exploration.chain import StochasticSampler
from robopolicy.policies.heads.flow import FlowPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import left_grid

SCHEDULES = ("constant", "learned", "learned_decay")
DECAY_START = 0.35  # fraction of training after which learned_decay lowers the upper bound along a cosine
DECAY_FRACTION = 0.7  # ... to 0.3 std_min + 0.7 std_max


@dataclass(frozen=True)
class NoiseConfig(Validated):
    """Injected noise: bounds in normalised action units, and the network that interpolates between them."""

    schedule: str = "learned"  # constant (std_max everywhere) | learned | learned_decay (shrinking upper bound)
    std_min: Annotated[Positive, AtMost("std_max")] = 0.08
    std_max: Positive = 0.16
    hidden: tuple[PositiveInt, ...] = (64, 64)
    time_dim: NonNegativeInt = 16  # width of the parameter-free time embedding; 0: noise independent of the step
    noise_clip: NonNegative = 3.0  # noise is clipped at this many standard deviations; 0 disables

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise unknown_name("noise schedule", self.schedule, SCHEDULES)


class NoiseNet(nn.Module):
    """Log standard deviations of transitions, between fixed bounds, from features and time."""

    log_std_max: Tensor

    def __init__(self, config: NoiseConfig, feature_dim: int, size: int) -> None:
        super().__init__()
        self.config = config
        self.time = SinusoidalEmbedding(config.time_dim) if config.time_dim else None
        self.body = MLP(feature_dim + config.time_dim, config.hidden, size, activation="tanh")
        self.register_buffer("log_std_max", torch.tensor(math.log(config.std_max)))
        self.requires_grad_(config.schedule != "constant")

    def forward(self, features: Tensor, t: Tensor) -> Tensor:
        """Interpolate the log-variance `(..., H * A)` between its bounds by `(tanh(y) + 1) / 2`.

        Times `t` broadcast with the leading dimensions of the `features` `(..., F)` of the observations.
        """
        if self.time is not None:
            shape = torch.broadcast_shapes(features.shape[:-1], t.shape)
            features = torch.cat([features.expand(*shape, -1), self.time(t).expand(*shape, -1)], -1)
        y = self.body(features)
        if self.config.schedule == "constant":
            return self.log_std_max.expand_as(y)
        low = math.log(self.config.std_min)
        return low + (self.log_std_max - low) * (y.tanh() + 1) / 2

    def set_progress(self, progress: float) -> None:
        """Set the upper bound of `learned_decay` for `progress` in [0, 1]."""
        if self.config.schedule != "learned_decay":
            return
        elapsed = min(max(progress - DECAY_START, 0.0) / (1 - DECAY_START), 1.0)
        fraction = 0.5 * (1 + math.cos(math.pi * elapsed))  # 1 -> 0
        final = (1 - DECAY_FRACTION) * self.config.std_min + DECAY_FRACTION * self.config.std_max
        self.log_std_max.fill_(math.log(final + (self.config.std_max - final) * fraction))


class StochasticFlow(StochasticSampler):
    """A flow head with learned noise; T = K decisions per chunk."""

    name: ClassVar[str] = "stochastic_flow"

    def __init__(self, head: GenerativePolicy, config: NoiseConfig) -> None:
        """Wrap `head` (any of the flow family); the noise network's parameters have the prefix `noise.`."""
        super().__init__(head)
        self.config = config
        self.noise_clip = config.noise_clip
        size = self.spec.horizon * self.spec.action_dim
        self.noise = NoiseNet(config, self.spec.obs_horizon * head.encoder.feature_dim, size)

    def transition(self, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Mean from the step of the head, log standard deviation from the noise network."""
        mean = self.head.sampler_step(features, x, k)
        flat = features.flatten(1).unflatten(0, (len(features), *(1 for _ in x.shape[1:-2])))  # (B, ..., To * F)
        log_std = self.noise(flat, k / self.head.config.steps).unflatten(-1, x.shape[-2:])
        return mean, log_std.expand_as(mean)

    def set_progress(self, progress: float) -> None:
        """Set the progress of the noise schedule and of the head."""
        super().set_progress(progress)
        self.noise.set_progress(progress)


class SDEChain(StochasticSampler):
    """A flow head with analytic noise; T = K decisions per chunk, scored per dimension."""

    name: ClassVar[str] = "sde_flow"
    diffusion: Tensor

    def __init__(self, head: GenerativePolicy, noise_level: float) -> None:
        """Wrap `head` (any of the flow family), which is shared, not copied.

        With `noise_level` c the last step has the standard deviation `c / sqrt(K (K - 1))`, in normalised units.
        """
        super().__init__(head)
        if noise_level < 0:
            raise UserError(f"noise_level must not be negative, got {noise_level}.")
        steps = head.config.steps
        t = left_grid(steps)
        diffusion = noise_level * ((1 - t) / t.clamp(min=1 / steps)).sqrt()
        self.register_buffer("diffusion", diffusion, persistent=False)  # (K,) g at the start of each step
        self._clips = isinstance(head, FlowPolicy) and head.config.clip_iterates

    def transition(self, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Euler-Maruyama step of the SDE."""
        steps = self.head.config.steps
        t, g = (k / steps)[:, None, None], self.diffusion[k][:, None, None]
        after = self.head.sampler_step(features, x, k)
        velocity = (after - x) * steps
        score = -(x - t * velocity) / (1 - t)
        mean = after + 0.5 * g.square() * score / steps
        mean = self.head.clip(mean) if self._clips else mean
        return mean, (g / steps**0.5).log().expand_as(mean)

    def step_logp(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Mean over all dimensions of the chunk: each affects the later steps, even if it is not executed."""
        return normal_log_density(x, mean, log_std).flatten(1).mean(1)

    def step_entropy(self, log_std: Tensor) -> Tensor:
        """Mean over all dimensions."""
        return normal_entropy(log_std).flatten(1).mean(1)
