"""Diffusion policy: a denoising network sampled by DDIM or DDPM (Diffusion Policy, Chi et al. 2023).

The network is trained at T discrete noise levels to predict noise, data or v, and evaluated at K of them. Every step
estimates the clean chunk, clips it by `action_clip`, recomputes the matching noise, and moves to the next level. DDIM
(Song et al. 2020) is deterministic; DDPM (Ho et al. 2020) is the same step with eta = 1, on any grid, and adds noise in
all steps except the last.

Iterates are on the variance-preserving path. `velocity` and `matching_loss` convert from the linear path at any time:
the log signal-to-noise ratio is interpolated between the levels, and times outside of the levels are clamped. The time
input of the network is `1 - (level + 1) / T`, from 0 (noise) to 1 (data).

Use it as the well-understood base policy, especially to match a published recipe. With fewer than about four steps
noise prediction fails: use v with trailing levels, or a flow head.

Deviations: the published code samples with DDPM in all T steps (sampler=ddpm steps=100) and, with DDIM, keeps the
predicted noise where the data were clipped. Recomputing it makes eta = 1 equal to DDPM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import AtLeastTwo, AtMost, OpenFraction, PositiveInt
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.generative import GenerativeConfig, GenerativePolicy
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import (
    PathEstimate,
    alpha_bars,
    estimate,
    level_at,
    prediction_target,
    spaced_levels,
    step_index,
    vp_coefficients,
)

SAMPLERS = ("ddim", "ddpm")
DIFFUSION_PREDICTIONS = ("noise", "data", "v")
MAX_SIGNAL = 0.6  # maximum amplitude of the data at the first level, as the sampler starts from pure noise


@dataclass(frozen=True)
class DiffusionConfig(GenerativeConfig):
    """Architecture, noise schedule and sampler of a `DiffusionPolicy`."""

    steps: Annotated[PositiveInt, AtMost("train_steps")] = 10  # K, sampler steps per chunk; published: 100
    train_steps: AtLeastTwo = 100  # T, noise levels
    sampler: str = "ddim"  # ddim (deterministic given the initial noise) | ddpm (ancestral); published: ddpm
    prediction: str = "noise"  # what the network predicts: noise | data | v (a * noise - b * data)
    schedule: str = "squared_cosine"  # squared_cosine | linear
    beta_start: Annotated[OpenFraction, AtMost("beta_end")] = 1e-4  # linear: first beta
    beta_end: OpenFraction = 0.02  # linear: last beta, for T = 1000
    spacing: str = "leading"  # sampler levels: leading (ends at 0) | trailing (starts at T - 1) | linspace (both)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler not in SAMPLERS:
            raise unknown_name("sampler", self.sampler, SAMPLERS)
        if self.prediction not in DIFFUSION_PREDICTIONS:
            raise unknown_name("prediction", self.prediction, DIFFUSION_PREDICTIONS)
        first = self.levels()[0]
        signal = float(self.alpha_bars()[first].sqrt())
        if signal > MAX_SIGNAL:
            hint = "" if self.schedule == "squared_cosine" else ", or policy.schedule=squared_cosine"
            raise UserError(
                f"The sampler would start from noise at level {first} of {self.train_steps}, which is {signal:.0%} "
                f"data; use more policy.steps, or policy.spacing=trailing{hint}."
            )

    def alpha_bars(self) -> Tensor:
        """Cumulative signal level `(T,)` of every training level, float64."""
        return alpha_bars(self.schedule, self.train_steps, self.beta_start, self.beta_end)

    def levels(self) -> list[int]:
        """Training level of every sampler step, from high to low."""
        return spaced_levels(self.spacing, self.train_steps, self.steps)


class DiffusionPolicy(GenerativePolicy):
    """DDIM or DDPM action chunks."""

    name: ClassVar[str] = "diffusion"
    config_class = DiffusionConfig
    family: ClassVar[str] = "diffusion"
    config: DiffusionConfig
    level_times: Tensor  # (T,) linear time of each level
    level_log_snr: Tensor  # (T,) log(signal power / noise power), falling
    grid: Tensor  # (K,) network time of each sampler step
    signal_scale: Tensor  # (K + 1,) data coefficient before each step; the last entry is the clean sample
    noise_scale: Tensor  # (K + 1,) noise coefficient
    ancestral_std: Tensor  # (K,) standard deviation of the DDPM posterior

    def __init__(self, config: DiffusionConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        all_bars = config.alpha_bars()
        level = torch.tensor(config.levels(), device=all_bars.device)
        a, b = vp_coefficients(all_bars)
        sampled = torch.cat([all_bars[level], all_bars.new_ones(1)])
        signal, noise = vp_coefficients(sampled)
        tables = {
            "level_times": a / (a + b),
            "level_log_snr": torch.logit(all_bars),
            "grid": self._network_time(level.double()),
            "signal_scale": signal,
            "noise_scale": noise,
            "ancestral_std": noise[1:] / noise[:-1] * (1 - sampled[:-1] / sampled[1:]).sqrt(),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.float().to(torch.get_default_device()), persistent=False)

    def _network_time(self, level: Tensor) -> Tensor:
        """Time input of the network for a (fractional) level."""
        return 1 - (level + 1) / self.config.train_steps

    def _on_path(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients `(B, 1, 1)` and network time `(B,)` of the level nearest to linear time `t` `(B,)`."""
        a, b, level = level_at(t, self.level_times, self.level_log_snr)
        return a, b, self._network_time(level)

    def _estimate(self, features: Tensor, x: Tensor, a: Tensor, b: Tensor, time: Tensor) -> PathEstimate:
        """Estimates of data and noise in the iterate `x`, the data within the action bounds."""
        found = estimate(self.config.prediction, self.backbone(x, time, features), x, a, b)
        if not self.config.action_clip:
            return found
        data = self.clip(found.data)
        return PathEstimate(data, (x - a * data) / b)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Data - noise as in the sampler, the data within the action bounds."""
        a, b, time = self._on_path(t)
        return self._estimate(features, x * (a + b), a, b, time).velocity

    def matching_loss(self, features: Tensor, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Mean squared error `(B, H)` of the configured prediction."""
        a, b, time = self._on_path(t)
        x = a * data + b * noise
        target = prediction_target(self.config.prediction, data, noise, a, b)
        return (self.backbone(x, time, features) - target).square().mean(-1)

    def sample_times(self, batch: int, generator: Randomness) -> Tensor:
        """Times of uniformly sampled levels."""
        draw = torch.special.ndtr(normal((batch, 1), generator, self.level_times.device)).squeeze(1)
        count = self.config.train_steps
        return self.level_times[(draw * count).long().clamp(max=count - 1)]

    def posterior(self, features: Tensor, x: Tensor, k: Tensor, eta: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the iterates after sampler steps `k`; shapes as in `sampler_step`.

        `eta` 0 is DDIM, 1 is DDPM; a tensor must broadcast against `(B, 1, 1)` and may be learned. The standard
        deviation of the last step is 0, so densities need a lower bound.
        """
        a, b = self.signal_scale[k][:, None, None], self.noise_scale[k][:, None, None]
        a_next, b_next = self.signal_scale[k + 1][:, None, None], self.noise_scale[k + 1][:, None, None]
        found = self._estimate(features, x, a, b, self.grid[k])
        std = eta * self.ancestral_std[k][:, None, None]
        # Bounded away from 0, where the square root has no gradient; 1e-10 is below the rounding of the mean.
        kept = (b_next.square() - std.square()).clamp(min=1e-20).sqrt()
        mean = a_next * found.data + kept * found.noise
        return mean, std.expand_as(mean)

    def sampler_step(self, features: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """DDIM step with eta = 0; `decode` is deterministic for any sampler of `act`."""
        return self.posterior(features, x, k, 0.0)[0]

    def draw_chunk(self, features: Tensor, generator: Randomness) -> Tensor:
        """Run the configured sampler; the noise of DDPM is part of it, even if `act` is deterministic."""
        if self.config.sampler == "ddim":
            return super().draw_chunk(features, generator)
        batch, device = len(features), features.device
        x = self.init_sample(self.draw_noise(batch, generator, device))
        for k in range(self.config.steps):
            x, std = self.posterior(features, x, step_index(k, x))
            if k < self.config.steps - 1:
                x = x + std * self.draw_noise(batch, generator, device)
        return self.action_normalizer.denormalize(self.clip(x))
