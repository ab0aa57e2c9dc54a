"""The last denoising steps of a diffusion policy as Gaussian decisions (DPPO, Ren et al. 2024).

`x_{k+1} ~ N(mean(x_k, k, s), max(std_k, std_min)^2)`, with mean and standard deviation of the DDPM posterior, or of the
DDIM step with the noise fraction eta. A frozen base takes the first K - K' steps with the same noise, unscored; the
head takes the last K' steps, which are scored. The last step would be noiseless; it gets `std_min`, without which there
is no density. This noise is not deployed. Only executed actions are scored, as in the published code, and the
log-density of each dimension is clamped.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.policies.density import normal_entropy, normal_log_density
from robopolicy.policies.exploration.chain import StochasticSampler
from robopolicy.policies.heads.diffusion import DiffusionPolicy
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import step_index
from robopolicy.policies.wrappers.staged import StagedDiffusion

LOGP_BOUNDS = (-5.0, 2.0)  # of the log-density per dimension; a standard deviation below 0.054 exceeds the upper bound
ETA_START = 0.9  # initial position of a learned eta between its bounds


class DiffusionChain(StochasticSampler):
    """A diffusion head whose last steps are scored; T = K' decisions per chunk."""

    name: ClassVar[str] = "diffusion_chain"
    head: DiffusionPolicy

    def __init__(
        self,
        head: DiffusionPolicy,  # takes the steps from `first` on; shared, not copied
        base: StagedDiffusion,  # takes the earlier steps; frozen by the caller, unused if `first` is 0
        *,
        first: int = 0,  # K - K'
        std_min: float = 0.1,  # minimum standard deviation, in normalised action units
        noise_clip: float = 3.0,  # noise is clipped at this many standard deviations; 0 disables
        eta: tuple[float, float] = (1.0, 1.0),  # bounds on the fraction of DDPM's noise; learned if they differ
    ) -> None:
        super().__init__(head)
        if not 0 <= first < head.config.steps:
            raise UserError(f"Of {head.config.steps} sampler steps, the last 1 to {head.config.steps} can be trained.")
        if std_min <= 0 or noise_clip < 0:
            raise UserError(f"A chain needs std_min > 0 and noise_clip >= 0, got {std_min} and {noise_clip}.")
        if not 0 <= eta[0] <= eta[1] or (head.config.sampler == "ddpm" and eta != (1.0, 1.0)):
            raise UserError(f"eta needs 0 <= lowest <= highest, and is 1 for the sampler ddpm; got {eta}.")
        self.base = base
        self._first = first
        self.std_min, self.noise_clip, self.eta_bounds = std_min, noise_clip, eta
        learned = eta[0] < eta[1]
        self.eta_logit = nn.Parameter(torch.logit(torch.tensor(ETA_START))) if learned else None

    @property
    def first_trained_step(self) -> int:
        """K - K'."""
        return self._first

    @property
    def eta(self) -> float | Tensor:
        """Fraction of the noise of DDPM in every step."""
        low, high = self.eta_bounds
        return high if self.eta_logit is None else low + (high - low) * self.eta_logit.sigmoid()

    def transition(self, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior of the head with a lower bound on the standard deviation."""
        return self._gaussian(self.head, features, x, k)

    def _gaussian(self, head: DiffusionPolicy, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = head.posterior(features, x, k, self.eta)
        return mean, std.clamp(min=self.std_min).log()

    def run_frozen_steps(self, obs: Observation, noise: Tensor, generator: Randomness) -> Tensor:
        """Run the steps of the frozen base with the noise of the trained steps."""

        def step(head: DiffusionPolicy, features: Tensor, x: Tensor, k: int) -> Tensor:
            mean, log_std = self._gaussian(head, features, x, step_index(k, x))
            draw = normal(mean.shape, generator, mean.device)
            return mean + log_std.exp() * (draw.clamp(-self.noise_clip, self.noise_clip) if self.noise_clip else draw)

        return self.base.run(obs, self.head.init_sample(noise), self.first_trained_step, step)

    def update_stats(self, obs: Observation) -> None:
        """Merge `obs` into the running statistics of the head, not of the base."""
        self.head.update_stats(obs)

    def dimension_logp(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Log-density `(..., Ta, A)` of each executed dimension of `x` `(..., H, A)`, before the clamp."""
        return normal_log_density(x, mean, log_std)[..., : self.spec.action_horizon, :]

    def step_logp(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Mean of the clamped log-densities over the executed dimensions."""
        return self.dimension_logp(x, mean, log_std).clamp(*LOGP_BOUNDS).flatten(1).mean(1)

    def step_entropy(self, log_std: Tensor) -> Tensor:
        """Mean over the executed dimensions."""
        return normal_entropy(log_std)[:, : self.spec.action_horizon].flatten(1).mean(1)
