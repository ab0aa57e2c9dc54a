"""STAC: one Gaussian critic of the one-step target, with pessimism from its standard deviation (Özalp 2026).

The critic fits mean and standard deviation of `r + gamma (mu' - beta sigma' - alpha log pi')` by likelihood. Its
standard deviation is the noise of rewards and of the next state, not of the whole return; target and actor subtract
beta times it. A single critic thus replaces the minimum of two in SAC, at half the cost, and its pessimism is a
setting.

Use it in place of SAC where updates are the bottleneck, or where values are overestimated. beta = 0 is a plain
distributional actor-critic. With deterministic rewards and dynamics the standard deviation comes from the policy's
draws only.

Reconstructed from the abstract and from published logs (the training code is not public). Own choices: the likelihood
is weighted by the variance, so that the mean is learned at the rate of a squared error. The dropout of the actor is a
setting of the policy (`policy.hidden_dropout=0.01`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.sac import SAC, SACConfig, soft_target
from robopolicy.constraints import NonNegative
from robopolicy.contrib.control.gaussian_critic import GaussianQ
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info
from robopolicy.policies.density import bounded

FLOOR = 1e-3  # smallest standard deviation in the likelihood


@dataclass(frozen=True)
class STACConfig(SACConfig):
    """Settings of STAC; beta and the critic's dropout follow the published runs; the actor's is set in the policy."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(
            members=1, hidden=(256, 256), activation="relu", layer_norm=False, dropout=0.01
        )
    )
    pessimism: NonNegative = 0.25  # beta, number of standard deviations subtracted from every value

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused("stac", self, "average_members")


def likelihood_loss(mean: Tensor, std: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood `(M, B)` of `target` `(B,)`, times the (constant) variance."""
    std = bounded(std, FLOOR, math.inf)
    return std.detach().square() * (0.5 * ((target - mean) / std).square() + std.log())


class STAC(SAC):
    """SAC with one critic of mean and standard deviation."""

    name = "stac"
    config_class = STACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "ozalp2026stac"
    uses_full_ensemble = True
    config: STACConfig
    critic: GaussianQ
    target_critic: GaussianQ

    def make_critic(self) -> GaussianQ:
        """Build the critic of means and standard deviations."""
        return GaussianQ(self.config.critic, self.policy)

    def pessimistic(self, critic: GaussianQ, obs: dict[str, Tensor], chunk: Tensor) -> Tensor:
        """`mu - beta sigma`, averaged over the members `(B,)`."""
        mean, std = critic.moments(obs, chunk)
        return (mean - self.config.pessimism * std).mean(0)

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * (mu' - beta sigma' - alpha log pi')` `(B,)`."""
        chunk, logp = self.draw_next(batch)
        value = self.pessimistic(self.target_critic, batch.next_obs, chunk)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Likelihood of the target, summed over the members and averaged over the batch."""
        mean, std = self.critic.moments(batch.obs, batch.chunk)
        target = self.target(batch).detach()
        loss = (likelihood_loss(mean, std, target) * batch.weight).mean(1).sum()
        info = {"value": mean.mean(), "target": target.mean(), "spread": std.mean()}
        return loss, {**info, "td_errors": (mean - target).abs().mean(0).detach()}

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """`alpha log pi - (mu - beta sigma)` at reparameterised chunks."""
        chunk, logp = self.draw(batch)
        return (alpha * logp - self.pessimistic(self.critic, batch.obs, chunk)).mean(), logp, {}
