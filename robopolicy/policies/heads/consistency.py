"""Consistency policy: one network call maps a noisy chunk to the clean end of its trajectory (Song et al. 2023).

The function `f(x, sigma) = c_skip x + c_out F(c_in x, ln(sigma) / 4)` is the identity at sigma_min by construction and
is trained to be constant along trajectories of the probability-flow ODE, in one of two ways:

- consistency training, `imitation_loss` of this class, needs no teacher: both points of a pair share data and noise,
  and the lower one, without gradient, is the target (Song and Dhariwal 2023: lognormal levels, pseudo-Huber loss, a
  grid that doubles during training). Trainers update the grid by `set_progress`.
- consistency distillation of a diffusion, EDM or flow policy: `robopolicy.algorithms.distill`.

With K > 1 steps `act` adds noise to the estimate again, up to the next level of the Karras grid, as in the papers.
`decode` has only one noise: it follows the trajectory of Gaussian data of standard deviation sigma_data. With K = 1
both are equal.

Use it for one-call policies with a good teacher. Training without a teacher rarely samples the highest levels: with
only some thousand updates a sigma_max of 10 is better than the published 80. Its chain is not a flow, so
policy-gradient fine-tuners of flows reject it.

Iterates are on the variance-exploding path, data + sigma * noise. `velocity` belongs to the straight line from a point
to its estimate; it equals the velocity of the flow if trajectories are straight.

Deviations: the pseudo-Huber loss is computed per step of the chunk, so that padded steps can be masked; `levels` counts
intervals, one less than N in the papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import AtMost, Finite, Positive, PositiveInt
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.edm import preconditioning
from robopolicy.policies.heads.generative import GenerativeConfig, GenerativePolicy
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import edm_sigma, karras_sigmas

HUBER = 0.00054  # times the root of the dimension: transition of the pseudo-Huber loss from square to absolute


@dataclass(frozen=True)
class ConsistencyConfig(GenerativeConfig):
    """Architecture, noise levels and sampler of a `ConsistencyPolicy`."""

    steps: PositiveInt = 1  # K
    sigma_min: Annotated[Positive, AtMost("sigma_max", exclusive=True)] = 0.002  # lowest noise: the identity
    sigma_max: Positive = 80.0  # highest noise level
    sigma_data: Positive = 0.5  # standard deviation of normalised actions
    rho: Positive = 7.0  # spacing of the grid: larger puts more levels at low noise
    levels_first: Annotated[PositiveInt, AtMost("levels_last")] = 10  # consistency training: initial intervals
    levels_last: PositiveInt = 1280  # ... and final intervals; the number doubles in between
    sigma_log_mean: Finite = -1.1  # consistency training: mean of ln(sigma)
    sigma_log_std: Positive = 2.0  # consistency training: standard deviation of ln(sigma)


class ConsistencyPolicy(GenerativePolicy):
    """Action chunks of a consistency function."""

    name: ClassVar[str] = "consistency"
    config_class = ConsistencyConfig
    family: ClassVar[str] = "consistency"
    config: ConsistencyConfig
    sigmas: Tensor  # (K + 1,) falling noise levels of the sampler; the last is sigma_min
    levels: Tensor  # () int64, intervals of the training grid

    def __init__(self, config: ConsistencyConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        sigmas = self._karras(config.steps).float().to(torch.get_default_device())
        self.register_buffer("sigmas", sigmas, persistent=False)
        self.register_buffer("levels", torch.tensor(config.levels_first))
        self._count = config.levels_first  # `levels`, without a wait for the device
        self._grid: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def _karras(self, intervals: int) -> Tensor:
        """Noise levels `(intervals + 1,)` from sigma_max to sigma_min."""
        return karras_sigmas(intervals + 1, self.config.sigma_min, self.config.sigma_max, self.config.rho)[:-1]

    def denoise(self, features: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """End of the trajectory `(B, H, A)` through `x`, a point at noise level `sigma` `(B, 1, 1)`."""
        return x - (sigma - self.config.sigma_min) * self._slope(features, x, sigma)

    def _slope(self, features: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """Mean change `(B, H, A)` of the trajectory per unit of sigma, without a division by zero at sigma_min."""
        above, spread = sigma - self.config.sigma_min, self.config.sigma_data
        _, _, c_in = preconditioning(sigma, spread)
        network = self.backbone(c_in * x, sigma.flatten().log() / 4, features)
        return above / (above.square() + spread**2) * x - spread * c_in * network

    def _sigma(self, t: Tensor) -> Tensor:
        """Noise level `(B, 1, 1)` nearest to linear time `t` `(B,)`."""
        low, high = 1 / (1 + self.config.sigma_max), 1 / (1 + self.config.sigma_min)
        return edm_sigma(t.clamp(low, high))[:, None, None]

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Data - noise on the straight line from `x` to its estimate."""
        sigma = self._sigma(t)
        x = x * (1 + sigma)
        return x - (1 + sigma) * self._slope(features, x, sigma)

    def matching_loss(self, features: Tensor, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Pseudo-Huber distance `(B, H)` to the estimate one grid interval below, divided by the interval width."""
        sigma, below = self._interval(self._sigma(t))
        estimate = self.denoise(features, data + sigma * noise, sigma)
        with torch.no_grad():
            target = self.denoise(features, data + below * noise, below)
        c = HUBER * math.sqrt(data.shape[-1])
        distance = ((estimate - target).square().sum(-1) + c**2).sqrt() - c
        return distance / (sigma - below).squeeze(-1)

    def _interval(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Ends of an interval of the training grid: `sigma`, at least the second lowest level, and the level below."""
        root = 1 / self.config.rho
        low, high = self.config.sigma_min**root, self.config.sigma_max**root
        position = ((sigma**root - low) / (high - low) * self.levels).clamp(min=1.0)
        below, above = (low + (position - back) / self.levels * (high - low) for back in (1, 0))
        return above**self.config.rho, below**self.config.rho

    def sample_times(self, batch: int, generator: Randomness) -> Tensor:
        """Times of the grid levels above the lowest, lognormal in sigma."""
        uniform = torch.special.ndtr(normal((batch, 1), generator, self.sigmas.device).squeeze(1))
        key = self._count, uniform.device
        if key not in self._grid:
            self._grid = {key: self._training_grid(*key)}
        edges, times = self._grid[key]
        return times[torch.searchsorted(edges, uniform).clamp(1, len(times) - 1)]

    def _training_grid(self, levels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cumulative probabilities and times `(levels + 1,)` of the levels of the training grid, rising in sigma."""
        sigmas = self._karras(levels).flip(0)
        scores = torch.erf((sigmas.log() - self.config.sigma_log_mean) / (math.sqrt(2) * self.config.sigma_log_std))
        edges = (scores - scores[0]) / (scores[-1] - scores[0])
        return edges.float().to(device), (1 / (1 + sigmas)).float().to(device)

    def set_progress(self, progress: float) -> None:
        """Double the training grid at equal intervals of progress; the grid never shrinks, e.g. in fine-tuning."""
        config = self.config
        stages = int(math.log2(config.levels_last / config.levels_first)) + 1
        self._count = max(self._count, min(config.levels_first * 2 ** int(progress * stages), config.levels_last))
        self.levels.fill_(self._count)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._count = int(self.levels)

    def init_sample(self, noise: Tensor) -> Tensor:
        """Noise of the highest level."""
        return self.sigmas[0] * noise

    def sampler_step(self, features: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """Estimate the end of the trajectory, then return to the next level on a Gaussian trajectory."""
        sigma, next_sigma = self.sigmas[k][:, None, None], self.sigmas[k + 1][:, None, None]
        data = self.clip(self.denoise(features, x, sigma))
        # Trajectories of centred Gaussian data are proportional to sqrt(sigma_data^2 + sigma^2).
        min_std, std, next_std = (self._total_std(level) for level in (self.sigmas[-1], sigma, next_sigma))
        return data + (next_std - min_std) / (std - min_std) * (x - data)

    def _total_std(self, sigma: Tensor) -> Tensor:
        return (sigma.square() + self.config.sigma_data**2).sqrt()

    def draw_chunk(self, features: Tensor, generator: Randomness) -> Tensor:
        """Estimate the chunk K times, with fresh noise in between, which is part of the sampler."""
        batch, device = len(features), features.device
        x = data = self.init_sample(self.draw_noise(batch, generator, device))
        for k, sigma in enumerate(self.sigmas[:-1]):
            if k:
                added = (sigma.square() - self.sigmas[-1].square()).sqrt()
                x = data + added * self.draw_noise(batch, generator, device)
            data = self.clip(self.denoise(features, x, sigma.view(1, 1, 1)))
        return self.action_normalizer.denormalize(data)
