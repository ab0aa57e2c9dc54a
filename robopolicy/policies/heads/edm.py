"""EDM policy: a preconditioned denoiser and a deterministic sampler on few, well-placed noise levels.

Karras et al. 2022: input and output of the network are scaled to unit variance at every noise level, `D(x, sigma) =
c_skip x + c_out F(c_in x, ln(sigma) / 4)`; training samples sigma from a lognormal distribution; sampling solves the
probability-flow ODE from sigma_max to 0 with Euler or Heun steps on the Karras grid.

Iterates are on the variance-exploding path, data + sigma * noise. `velocity` and `matching_loss` convert from the
linear path; noise levels are clamped to [sigma_min, sigma_max].

Use it as teacher for consistency distillation, or for accurate samples with Heun and about 18 steps. Below about ten
steps Heun overshoots (even with a perfect denoiser), while Euler only blurs. Do not fine-tune it by policy gradients on
its chain: the sampler is deterministic, while flow heads and DDPM have noisy steps.

Deviation: estimates of the clean chunk are clipped by `action_clip` while sampling, as in the other heads; 0 disables
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import AtMost, Finite, Positive, PositiveInt
from robopolicy.errors import unknown_name
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.generative import GenerativeConfig, GenerativePolicy
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import PathEstimate, edm_sigma, karras_sigmas, step_index

SOLVERS = ("heun", "euler")


@dataclass(frozen=True)
class EDMConfig(GenerativeConfig):
    """Architecture, noise levels and solver of an `EDMPolicy`."""

    steps: PositiveInt = 10  # K, sampler steps per chunk; published: 18 of heun
    solver: str = "euler"  # euler | heun (second order, 2 K - 1 network calls, for ten steps and more)
    sigma_min: Annotated[Positive, AtMost("sigma_max", exclusive=True)] = 0.002  # lowest noise level before 0
    sigma_max: Positive = 80.0  # highest noise level
    sigma_data: Positive = 0.5  # standard deviation of normalised actions
    rho: Positive = 7.0  # spacing of the grid: larger puts more steps at low noise
    sigma_log_mean: Finite = -1.2  # training: mean of ln(sigma)
    sigma_log_std: Positive = 1.2  # training: standard deviation of ln(sigma)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver not in SOLVERS:
            raise unknown_name("solver", self.solver, SOLVERS)


def preconditioning(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor, Tensor]:
    """(c_skip, c_out, c_in) at noise level `sigma`."""
    total = sigma.square() + sigma_data**2
    return sigma_data**2 / total, sigma * sigma_data * total.rsqrt(), total.rsqrt()


class EDMPolicy(GenerativePolicy):
    """Action chunks of a preconditioned denoiser."""

    name: ClassVar[str] = "edm"
    config_class = EDMConfig
    family: ClassVar[str] = "edm"
    config: EDMConfig
    sigmas: Tensor  # (K + 1,) falling noise levels; the last is 0

    def __init__(self, config: EDMConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        sigmas = karras_sigmas(config.steps, config.sigma_min, config.sigma_max, config.rho)
        self.register_buffer("sigmas", sigmas.float().to(torch.get_default_device()), persistent=False)

    @property
    def nfe(self) -> int:
        """K, or 2 K - 1 with corrections of Heun in all steps except the last."""
        return 2 * self.config.steps - 1 if self.config.solver == "heun" else self.config.steps

    def _sigma(self, t: Tensor) -> Tensor:
        """Noise level `(B, 1, 1)` nearest to linear time `t` `(B,)`."""
        config = self.config
        return edm_sigma(t.clamp(1 / (1 + config.sigma_max), 1 / (1 + config.sigma_min)))[:, None, None]

    def _network(self, features: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        _, _, c_in = preconditioning(sigma, self.config.sigma_data)
        return self.backbone(c_in * x, sigma.flatten().log() / 4, features)

    def denoise(self, features: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """Expected data `(B, H, A)` given `x = data + sigma * noise`, within the action bounds; `sigma` `(B, 1, 1)`."""
        c_skip, c_out, _ = preconditioning(sigma, self.config.sigma_data)
        return self.clip(c_skip * x + c_out * self._network(features, x, sigma))

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Data - noise as in the sampler, the data within the action bounds."""
        sigma = self._sigma(t)
        x = x * (1 + sigma)
        data = self.denoise(features, x, sigma)
        return PathEstimate(data, (x - data) / sigma).velocity

    def matching_loss(self, features: Tensor, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Mean squared error `(B, H)` of the network: the error of the denoiser, weighted by `1 / c_out^2`."""
        sigma = self._sigma(t)
        x = data + sigma * noise
        c_skip, c_out, _ = preconditioning(sigma, self.config.sigma_data)
        return (self._network(features, x, sigma) - (data - c_skip * x) / c_out).square().mean(-1)

    def sample_times(self, batch: int, generator: Randomness) -> Tensor:
        """Times of lognormal noise levels."""
        draw = normal((batch, 1), generator, self.sigmas.device).squeeze(1)
        return 1 / (1 + (self.config.sigma_log_mean + self.config.sigma_log_std * draw).exp())

    def init_sample(self, noise: Tensor) -> Tensor:
        """Noise of the highest level."""
        return self.sigmas[0] * noise

    def sampler_step(self, features: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """One Euler or Heun step of `dx = (x - D(x, sigma)) / sigma dsigma`; the last step is always Euler."""
        return self._step(features, x, k, correct=self.config.solver == "heun")

    def integrate(self, features: Tensor, noise: Tensor) -> Tensor:
        """Run all steps, without the unused correction of the last step."""
        x, last = self.init_sample(noise), self.config.steps - 1
        for k in range(self.config.steps):
            x = self._step(features, x, step_index(k, x), correct=self.config.solver == "heun" and k < last)
        return self.action_normalizer.denormalize(self.clip(x))

    def _step(self, features: Tensor, x: Tensor, k: Tensor, *, correct: bool) -> Tensor:
        sigma, next_sigma = self.sigmas[k][:, None, None], self.sigmas[k + 1][:, None, None]
        slope = (x - self.denoise(features, x, sigma)) / sigma
        euler = x + (next_sigma - sigma) * slope
        if not correct:
            return euler
        safe = next_sigma.clamp(min=self.config.sigma_min)  # no slope at 0: these rows use Euler
        corrected = (slope + (euler - self.denoise(features, euler, safe)) / safe) / 2
        return torch.where(next_sigma > 0, x + (next_sigma - sigma) * corrected, euler)
