"""Cal-QL: conservative Q-learning, calibrated by returns, on a squashed Gaussian (Nakamoto et al. 2023).

SAC plus a penalty that lowers the values of sampled chunks towards the value of the data's chunk, unless they already
lie below the return of the data. Plain CQL lowers such values further and has to unlearn that in online training.

Use it to pretrain offline and continue online with one algorithm and a simple policy. For a diffusion, flow or
autoregressive policy use pa_rl, whose critic has the same penalty on candidates. Returns are known only if episodes
terminate; otherwise the bound has no effect and this is CQL.

Deviations from the public code: sampled chunks have no importance weights (they need densities of executed parts of
chunks); candidates are sampled at the current observation, not also at the next one; the penalty weight is fixed,
without a Lagrange multiplier; rewards are the task's (there, on antmaze: 10 r - 5), and so the temperature starts at
0.01 (there: 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from robopolicy.algorithms.common.offline import ConservativeConfig, ConservativeObjective
from robopolicy.algorithms.common.td_loss import td_loss
from robopolicy.algorithms.sac import actor_loss, soft_target
from robopolicy.constraints import Positive, PositiveInt
from robopolicy.critics.q import CriticConfig, random_subset_min
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class CalQLConfig(MaxEntropyConfig):
    """Settings of Cal-QL; defaults are the public code's for sparse rewards unless noted."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256, 256, 256), activation="relu", layer_norm=False)
    )
    lr: Positive = 1e-4  # learning rate of the actor
    temperature: Positive = 0.01  # initial weight of the entropy (published: 1, with rewards ten times as large)
    conservative: ConservativeConfig = field(default_factory=ConservativeConfig)  # penalty; weight 1 with dense data
    backup_entropy: bool = False  # entropy in the critic's target, of the best candidate
    candidates: PositiveInt = 10  # policy chunks per row, in the penalty and the target


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
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, executed_dims(policy))
        self.optimizer = make_adam(policy, config.lr, config.weight_decay)

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows with returns, which calibrate the penalty."""
        return replace(super().sample_spec, returns=True)

    def sample_candidates(self, obs: Observation) -> Tensor:
        """Sample chunks `(B, C, H, A)` of the policy."""
        return self.policy.sample_many(obs, self.config.candidates, generator=self.generator)

    def target(self, batch: Transitions) -> Tensor:
        """Bootstrap from the best candidate at the next observation."""
        chunks = self.sample_candidates(batch.next_obs)
        values = self.target_critic.candidate_values(batch.next_obs, chunks)  # (M, B, C)
        best = random_subset_min(values, self.config.num_min_qs, self.generator).max(1)
        if not self.config.backup_entropy:
            return torch.addcmul(batch.reward, batch.discount, best.values)
        chunk = chunks[torch.arange(len(chunks), device=chunks.device), best.indices]
        logp = self.policy.log_density(batch.next_obs, chunk)
        return soft_target(batch, best.values, logp, self.temperature.value, self.config)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss and the calibrated penalty."""
        loss, info = td_loss(self.critic, batch, self.target)
        penalty, more = self.objective.penalty(batch, self.critic, self.sample_candidates(batch.obs))
        return loss + penalty, info | more

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed steps of actor and temperature."""
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
