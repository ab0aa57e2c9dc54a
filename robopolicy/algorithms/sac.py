"""Soft actor-critic (Haarnoja et al. 2018) with a tanh-Gaussian policy and a learned temperature.

Use it to learn from scratch with dense rewards, or through RLPD with demonstrations in every batch. For a pretrained
diffusion or flow policy use a fine-tuner: SAC's policy cannot represent several modes.

Deviations from the paper: the critics may be an ensemble with subsampled minimum (REDQ) and LayerNorm, actions are
chunks if the policy has a horizon, and truncated episodes bootstrap from their last observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import (
    MaxEntropyConfig,
    Temperature,
    actor_optimizer,
    executed_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step, require_squashed
from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class SACConfig(MaxEntropyConfig):
    """Settings of SAC."""


def soft_target(batch: Transitions, value: Tensor, logp: Tensor, alpha: Tensor, config: MaxEntropyConfig) -> Tensor:
    """Bootstrap `value` `(B,)` plus the entropy `-alpha log pi(a' | s')` of the next chunk, if `backup_entropy`."""
    return value - batch.discount * alpha * logp if config.backup_entropy else value


def actor_loss(
    actor: GaussianPolicy, critic: QEnsemble, obs: Observation, alpha: Tensor, generator: Randomness = None
) -> tuple[Tensor, Tensor]:
    """`alpha log pi - min Q` at reparameterised chunks, and the log-probabilities `(B,)`."""
    chunk, logp = actor.rsample(obs, generator=generator)
    return (alpha.detach() * logp - critic.min_q(obs, chunk)).mean(), logp


class SAC(OffPolicy):
    """Soft actor-critic on chunks."""

    name = "sac"
    config_class = SACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "haarnoja2018sac"
    config: SACConfig
    policy: GaussianPolicy

    def __init__(self, config: SACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, require_squashed(policy, self.name), total_updates=total_updates)
        self.temperature = Temperature(config.temperature)
        self.target_entropy = target_entropy(config, executed_dims(policy))
        self.optimizer = actor_optimizer(policy, self.temperature, config)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        chunk, logp = self.policy.rsample(batch.next_obs, generator=self.generator)
        value = self.bootstrap(batch, chunk)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """Loss of the actor, log-probabilities `(B,)` of its chunks, and further metrics; a hook."""
        return *actor_loss(self.policy, self.critic, batch.obs, alpha, self.generator), {}

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed steps of actor and temperature."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))  # TD loss towards `target`, Adam, Polyak
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(part, alpha)
                optimizer_step(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
                stats.actor(loss=loss, entropy=-logp.mean(), temperature=alpha, **info)
        return self.finish(batch, stats)  # TD errors, normalisers, counter

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature and actor optimiser."""
        return {**super().checkpoint_items(), "temperature": self.temperature, "optimizer": self.optimizer}
