"""RLPD: reinforcement learning with prior data (Ball et al. 2023), SAC with demonstrations in every batch.

Three changes to SAC make a dataset useful from the first step: every batch is half dataset, half online data; LayerNorm
bounds the critics' extrapolation; and a large ensemble, of which two random members form the target, allows many critic
steps per environment step.

The temperature starts at 0.01 and the target has no entropy, because the return of a sparse task is at most 1. From 1,
the published start, it falls by a factor of e in 3300 actor steps: in a small budget the entropy outweighs the return
and the actor stays random. With dense rewards set `temperature=1` and `backup_entropy=true`.

Use it to learn from scratch with demonstrations or logged data with rewards. To improve a pretrained diffusion or flow
policy use expo or pa_rl: this policy is a Gaussian that starts untrained and never imitates.

Deviations from the public code: settings count per decision of one environment; the loss is summed over the critics
(there: averaged), which Adam ignores; networks use torch's initialisation; the temperature's gradient is with respect
to its logarithm, as in Stable-Baselines3, so high temperatures change less and low ones more; the smallest log standard
deviation is the policy's (-5 by default; there -20).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import (
    MaxEntropyConfig,
    Temperature,
    executed_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, make_adam, optimizer_step, require_squashed
from robopolicy.algorithms.sac import soft_target
from robopolicy.constraints import Finite, Positive, PositiveInt, Ratio
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class RLPDConfig(MaxEntropyConfig):
    """Settings of RLPD; defaults are the public code's, but the entropy is weighted for sparse rewards.

    `replay.offline_fraction` is its half.
    """

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(members=10, hidden=(256, 256), activation="relu", layer_norm=True)
    )
    utd: Ratio = 20.0  # critic steps per decision of one environment
    policy_delay: PositiveInt = 20  # critic steps per step of actor and temperature
    temperature: Positive = 0.01  # initial weight of the entropy (published: 1)
    backup_entropy: bool = False  # entropy in the critic's target (published: true, false for sparse rewards)
    target_entropy: Finite | None = None  # [nats]; None: minus half the number of executed action dimensions


def actor_loss(
    policy: GaussianPolicy, critic: QEnsemble, obs: Observation, alpha: Tensor, generator: Randomness = None
) -> tuple[Tensor, Tensor]:
    """`alpha log pi - mean Q` at reparameterised chunks, and the log-probabilities `(B,)`."""
    chunk, logp = policy.rsample(obs, generator=generator)
    return (alpha * logp - critic(obs, chunk).mean(0)).mean(), logp


class RLPD(OffPolicy):
    """SAC with a large ensemble on mixed batches; the actor maximises the mean of all critics."""

    name = "rlpd"
    config_class = RLPDConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "ball2023rlpd"
    needs_dataset: ClassVar[bool] = True
    config: RLPDConfig
    policy: GaussianPolicy

    def __init__(self, config: RLPDConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, require_squashed(policy, self.name), total_updates=total_updates)
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, executed_dims(policy))
        if config.target_entropy is None and not config.target_std:
            self.target_entropy /= 2
        self.optimizer = make_adam(policy, config.lr, config.weight_decay)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation under random members."""
        chunk, logp = self.policy.rsample(batch.next_obs, generator=self.generator)
        value = self.next_value(batch, chunk)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on minibatches of offline and online data, with delayed steps of actor and temperature."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(self.policy, self.critic, part.obs, alpha, self.generator)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature and actor optimiser."""
        return {**super().checkpoint_items(), **self.temperature.checkpoint_items(), "optimizer": self.optimizer}
