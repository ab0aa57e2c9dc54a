"""Soft actor-critic (Haarnoja et al. 2018) with a tanh-Gaussian policy and a learned temperature.

Use it to learn from scratch with dense rewards, or through RLPD with demonstrations in every batch. For a pretrained
diffusion or flow policy use a fine-tuner: SAC's policy cannot represent several modes. FlashSAC (Kim et al. 2026) is
for thousands of environments on a GPU: inverted residual networks (`critic.backbone`, `policy.backbone`),
distributional critics (`critic.histogram=c51`), scaled rewards (`replay.return_max`), and noise that is held for
several steps (`replay.noise_repeat`).

Deviations from the papers: the critics may be an ensemble with subsampled minimum (REDQ) and LayerNorm, actions are
chunks if the policy has a horizon, and truncated episodes bootstrap from their last observation. Unlike in FlashSAC's
code, the critic steps before the actor, and the temperature's loss is in its logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import (
    MaxEntropyConfig,
    Temperature,
    executed_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import (
    OffPolicy,
    UpdateStats,
    make_adam,
    optimizer_step,
    require_squashed,
)
from robopolicy.algorithms.common.td_loss import regression_loss
from robopolicy.critics.q import C51, QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.nets.inverted_residual import batch_norms, batch_statistics
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness

Draw = tuple[Tensor, Tensor]
"""Chunk `(B, H, A)` and the log-probability `(B,)` of its executed part."""


@dataclass(frozen=True)
class SACConfig(MaxEntropyConfig):
    """Settings of SAC."""

    average_members: bool = False  # target of every member from itself, actor by the mean (FastSAC); false: minimum


def soft_target(batch: Transitions, value: Tensor, logp: Tensor, alpha: Tensor, config: MaxEntropyConfig) -> Tensor:
    """`reward + discount * value` `(B,)`; `value` gains the entropy `-alpha log pi(a' | s')` if `backup_entropy`."""
    soft = torch.addcmul(value, alpha, logp, value=-1) if config.backup_entropy else value
    return torch.addcmul(batch.reward, batch.discount, soft)


def actor_loss(
    actor: GaussianPolicy,
    critic: QEnsemble,
    obs: Observation,
    alpha: Tensor,
    generator: Randomness = None,
    *,
    reduction: str = "min",
) -> tuple[Tensor, Tensor]:
    """`alpha log pi - Q` of chunks, with the minimum or mean of members, and the log-probabilities `(B,)`."""
    chunk, logp = actor.rsample(obs, generator=generator)
    value = critic.min_q(obs, chunk) if reduction == "min" else critic(obs, chunk).mean(0)
    return (alpha * logp - value).mean(), logp


def joined(first: Observation, second: Observation) -> Observation:
    """Rows of both observations."""
    return {key: torch.cat([value, second[key]]) for key, value in first.items()}


class SAC(OffPolicy):
    """Soft actor-critic on chunks."""

    name = "sac"
    config_class = SACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "haarnoja2018sac"
    joint_batches = True
    config: SACConfig
    policy: GaussianPolicy

    def __init__(self, config: SACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, require_squashed(policy, self.name), total_updates=total_updates)
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, executed_dims(policy))
        self.optimizer = make_adam(policy, config.lr, config.weight_decay)
        self._critic_norms = batch_norms(self.critic, self.target_critic)
        self._actor_norms = batch_norms(self.policy)
        self._drawn: tuple[Draw, Draw] | None = None  # at the observations and the next ones of this minibatch

    @property
    def averages_members(self) -> bool:
        """As configured by `average_members`."""
        return self.config.average_members

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def entropy_cost(self, logp: Tensor) -> Tensor | None:
        """`alpha log pi` `(B,)` if `backup_entropy`."""
        return self.temperature.value * logp if self.config.backup_entropy else None

    def draw(self, batch: Transitions) -> Draw:
        """Reparameterised chunk and log-probability at the observations."""
        return self._drawn[0] if self._drawn else self.policy.rsample(batch.obs, generator=self.generator)

    def draw_next(self, batch: Transitions) -> Draw:
        """Chunk and log-probability at the next observations; called without gradients."""
        return self._drawn[1] if self._drawn else self.policy.rsample(batch.next_obs, generator=self.generator)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        chunk, logp = self.draw_next(batch)
        if isinstance(self.critic.histogram, C51):
            return self.distributional_target(batch, chunk, self.entropy_cost(logp))
        return soft_target(batch, self.next_value(batch, chunk), logp, self.temperature.value, self.config)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss; batch normalisation sees the next chunks in the same batch, as in FlashSAC."""
        if not self._critic_norms:
            return super().critic_loss(batch)
        with torch.no_grad():
            chunk, logp = self.policy.rsample(batch.next_obs, generator=self.generator)
        rows, obs, chunks = len(batch), joined(batch.obs, batch.next_obs), torch.cat([batch.chunk, chunk])
        with batch_statistics(self._critic_norms):
            output, lagged = (each.output(each.encode(obs), chunks) for each in (self.critic, self.target_critic))
        with torch.no_grad():
            targets = self.backup_outputs(batch, lagged[:, rows:], self.entropy_cost(logp))
        return regression_loss(self.critic, batch, output[:, :rows], targets)

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """Loss of the actor, log-probabilities `(B,)` of its chunks, and further metrics; a hook."""
        if self._actor_norms:
            with batch_statistics(self._actor_norms):
                both = self.policy.rsample(joined(batch.obs, batch.next_obs), generator=self.generator)
            chunk, logp = (each[: len(batch)] for each in both)
        else:
            chunk, logp = self.draw(batch)
        critic = self.critic
        value = critic(batch.obs, chunk).mean(0) if self.averages_members else critic.min_q(batch.obs, chunk)
        return (alpha * logp - value).mean(), logp, {}

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed steps of actor and temperature."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            self._drawn = self._draw_both(part)
            stats.critic(self.critic_step(part))  # TD loss towards `target`, Adam, Polyak
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(part, alpha)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha, **info)
        self._drawn = None
        return self.finish(batch, stats)  # TD errors, normalisers, counter

    def _draw_both(self, batch: Transitions) -> tuple[Draw, Draw] | None:
        """Draws at both observations in one pass, where launches cost more than the gradients of the second half.

        The critic's step does not change the policy. None on a CPU, without a step of the actor, and for images.
        """
        if batch.reward.device.type == "cpu" or not self.policy_due(ahead=1) or self.policy.encoder.encoded:
            return None
        if self._critic_norms or self._actor_norms:  # these draw by rules of their own
            return None
        chunk, logp = self.policy.rsample(joined(batch.next_obs, batch.obs), generator=self.generator)
        (after, now), (logp_after, logp_now) = chunk.chunk(2), logp.chunk(2)  # in the order of draws on a CPU
        return (now, logp_now), (after.detach(), logp_after.detach())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature and actor optimiser."""
        return {**super().checkpoint_items(), **self.temperature.checkpoint_items(), "optimizer": self.optimizer}
