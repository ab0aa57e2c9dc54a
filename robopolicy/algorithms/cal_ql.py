"""Cal-QL: conservative Q-learning, calibrated by returns, on a squashed Gaussian (Nakamoto et al. 2023).

SAC plus a penalty that holds the values of sampled chunks down near that of the data's chunk, except that a value which
already lies below the return of the data is left alone. Plain CQL pushes such values ever further down and then has to
unlearn that when it goes online; the bound removes the dip.

Use it to pretrain offline and go on online with one algorithm and a simple policy. For a diffusion, flow or
autoregressive policy use pa_rl, whose critic follows the same rule by sampled candidates. Episodes must terminate for
their returns to be known: where none do, the bound never acts and this is CQL.

Deviations from the public code: sampled chunks carry no importance weights (they need densities of executed parts of
chunks); candidates come from the policy at the observation itself and not also at the next one; the weight of the
penalty is fixed, without a Lagrange multiplier; rewards are the task's (there, on antmaze: 10 r - 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import (
    MaxEntropyConfig,
    Temperature,
    actor_optimizer,
    executed_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step, require_squashed, td_loss
from robopolicy.algorithms.common.offline import ConservativeConfig, ConservativeObjective
from robopolicy.algorithms.sac import actor_loss, soft_target
from robopolicy.constraints import Positive, PositiveInt
from robopolicy.critics.q import CriticConfig, random_subset_min
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class CalQLConfig(MaxEntropyConfig):
    """Settings of Cal-QL; defaults are the public code's for sparse rewards."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256, 256, 256), activation="relu", layer_norm=False)
    )
    lr: Positive = 1e-4  # learning rate of the actor
    conservative: ConservativeConfig = field(default_factory=ConservativeConfig)  # penalty; weight 1 with dense data
    backup_entropy: bool = False  # entropy in the critic's target, of the best candidate
    candidates: PositiveInt = 10  # chunks of the policy per row, in the penalty and for the best one in the target


class CalQL(OffPolicy):
    """SAC with a calibrated conservative critic."""

    name = "cal_ql"
    config_class = CalQLConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "nakamoto2023calql"
    requires_action_bounds = True
    config: CalQLConfig
    policy: GaussianPolicy

    def __init__(self, config: CalQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, require_squashed(policy, self.name), total_updates=total_updates)
        self.objective = ConservativeObjective(config.conservative, self.generator)
        self.temperature = Temperature(config.temperature)
        self.target_entropy = target_entropy(config, executed_dims(policy))
        self.optimizer = actor_optimizer(policy, self.temperature, config)

    def sample_candidates(self, obs: Observation) -> Tensor:
        """Chunks `(B, C, H, A)` of the policy."""
        return self.policy.sample_many(obs, self.config.candidates, generator=self.generator)

    def target(self, batch: Transitions) -> Tensor:
        """Bootstrap from the best of the candidates at the next observation."""
        chunks = self.sample_candidates(batch.next_obs)
        values = self.target_critic.candidate_values(batch.next_obs, chunks)  # (M, B, C)
        best = random_subset_min(values, self.config.num_min_qs, self.generator).max(1)
        value = batch.reward + batch.discount * best.values
        if not self.config.backup_entropy:
            return value
        chunk = chunks[torch.arange(len(chunks), device=chunks.device), best.indices]
        logp = self.policy.log_density(batch.next_obs, chunk)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss and the calibrated penalty."""
        loss, info = td_loss(self.critic, batch, self.target)
        penalty, more = self.objective.penalty(batch, self.critic, self.sample_candidates(batch.obs))
        return loss + penalty, info | more

    def update(self, batch: Transitions) -> Metrics:
        """Critic steps on consecutive minibatches, steps of actor and temperature in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(self.policy, self.critic, part.obs, alpha, self.generator)
                optimizer_step(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
                stats.actor(loss=loss, entropy=-logp.mean(), temperature=alpha)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the temperature and the optimiser of actor and temperature."""
        return {**super().checkpoint_items(), "temperature": self.temperature, "optimizer": self.optimizer}
