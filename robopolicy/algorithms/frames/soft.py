"""What soft actor-critics share: an actor with entropy, its learned weight, and one step of both.

SAC and its relatives differ in what judges the actor and in the loss of the critic; SRL plays sequences, PMOE several
experts, DSRL the noise of a frozen policy. Each says what its `actor_loss` is.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Stateful
from robopolicy.algorithms.frames.off_policy import OffPolicy, OffPolicyConfig, descend
from robopolicy.constraints import Finite, NotNegative, Positive
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class SoftConfig(OffPolicyConfig):
    """Settings of every soft actor-critic; the sizes are Stable-Baselines3's."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    temperature: Positive = 1.0  # initial weight of the entropy
    temperature_lr: NotNegative = 3e-4  # 0 keeps it fixed
    target_entropy: Finite | None = None  # nats; None is minus the number of action dimensions that the entropy counts
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


class SoftOffPolicy(OffPolicy):
    """An actor and the weight of its entropy, moved by one optimiser; subclasses define `target` and `actor_loss`."""

    config: SoftConfig
    policy: Any  # with `sample_uniform`

    def __init__(self, config: SoftConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy`."""
        super().__init__(config, policy, total_updates=total_updates)
        self.temperature = Temperature(config.temperature)
        self.target_entropy = -float(self.entropy_dims) if config.target_entropy is None else config.target_entropy
        groups = [
            {"params": list(self.actor.parameters()), "lr": config.lr},
            {"params": list(self.temperature.parameters()), "lr": config.temperature_lr},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    @property
    def actor(self) -> Policy:
        """What is trained; the whole policy, unless a part of it is frozen."""
        return self.policy

    @property
    def entropy_dims(self) -> int:
        """Action dimensions whose log-probability `actor_loss` returns."""
        return self.policy.spec.execute * self.policy.spec.action_dim

    @abstractmethod
    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """Loss of the actor, log-probabilities `(B,)` of what it drew, and what else to log."""

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Uniform over the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def soft(self, batch: Transitions, value: Tensor, logp: Tensor) -> Tensor:
        """`value` `(B,)` of the next observation with the entropy there, unless the settings leave it out."""
        return value - batch.discount * self.temperature.value * logp if self.config.backup_entropy else value

    def actor_step(self, batch: Transitions) -> Info:
        """One step of the actor and of the temperature; neither loss has a gradient for the other."""
        alpha = self.temperature.value
        loss, logp, info = self.actor_loss(batch, alpha)
        descend(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
        return {"loss": loss, "entropy": -logp.mean(), "temperature": alpha, **info}

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts, the temperature and the optimiser of actor and temperature."""
        return {**super().parts(), "temperature": self.temperature, "optimizer": self.optimizer}
