"""Soft actor-critic (Haarnoja et al. 2018) with a tanh-Gaussian policy and a learned temperature.

Use it to learn from scratch with dense rewards, or through RLPD with demonstrations in every batch. For a pretrained
diffusion or flow policy use a fine-tuner: SAC's own policy cannot represent several modes.

Deviations from the paper: the critics may be an ensemble with subsampled minimum (REDQ) and LayerNorm, actions come in
chunks where the policy has a horizon, and truncated episodes bootstrap from their last observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Stateful
from robopolicy.algorithms.frames.off_policy import OffPolicy, OffPolicyConfig, descend
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.transitions import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """Settings of SAC; the sizes are Stable-Baselines3's."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    temperature: float = 1.0  # initial weight of the entropy
    temperature_lr: float = 3e-4  # 0 keeps it fixed
    target_entropy: float | None = None  # nats; None is minus the number of executed action dimensions
    backup_entropy: bool = True  # entropy in the critic's target; false where success ends episodes and pays once


class Temperature(nn.Module):
    """Positive weight of the entropy, learned so that the entropy stays near its target."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))

    @property
    def value(self) -> Tensor:
        """Current weight."""
        return self.log.exp()

    def loss(self, logp: Tensor, target_entropy: float) -> Tensor:
        """Grows the weight while the entropy `-logp` `(B,)` lies below its target."""
        return -(self.log * (logp.detach() + target_entropy)).mean()


def actor_loss(
    policy: GaussianPolicy, critic: QEnsemble, obs: Observation, alpha: Tensor, generator: Randomness = None
) -> tuple[Tensor, Tensor]:
    """`alpha log pi - min Q` at reparameterised chunks; returns it with the log-probabilities `(B,)`."""
    chunk, logp = policy.rsample(obs, generator=generator)
    return (alpha.detach() * logp - critic.lowest(obs, chunk)).mean(), logp


class SAC(OffPolicy):
    """Soft actor-critic on chunks."""

    name = "sac"

    def __init__(self, config: SACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
            raise UserError(
                f"Algorithm '{self.name}' trains a squashed Gaussian, got '{policy.name}'; "
                "pass policy=squashed_gaussian."
            )
        super().__init__(config, policy, total_updates=total_updates)
        self.config: SACConfig = config
        self.policy: GaussianPolicy = policy
        self.temperature = Temperature(config.temperature)
        dims = policy.spec.execute * policy.spec.action_dim
        self.target_entropy = -float(dims) if config.target_entropy is None else config.target_entropy
        groups = [
            {"params": list(policy.parameters()), "lr": config.lr},
            {"params": list(self.temperature.parameters()), "lr": config.temperature_lr},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Uniform over the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        chunk, logp = self.policy.rsample(batch.next_obs, generator=self.generator)
        value = self.bootstrap(batch, chunk)
        return value - batch.discount * self.temperature.value * logp if self.config.backup_entropy else value

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of the actor and log-probabilities `(B,)` of what it drew."""
        return actor_loss(self.policy, self.critic, batch.obs, alpha, self.generator)

    def actor_step(self, batch: Transitions) -> Info:
        """One step of the actor and of the temperature; neither loss has a gradient for the other."""
        alpha = self.temperature.value
        loss, logp = self.actor_loss(batch, alpha)
        descend(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
        return {"loss": loss, "entropy": -logp.mean(), "temperature": alpha}

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts, the temperature and the optimiser of actor and temperature."""
        return {**super().parts(), "temperature": self.temperature, "optimizer": self.optimizer}
