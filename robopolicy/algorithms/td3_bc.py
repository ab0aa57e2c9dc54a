"""TD3+BC: TD3 on a dataset with an imitation term in the actor loss (Fujimoto and Gu 2021).

The actor loss is `-alpha Q(s, pi(s)) / mean|Q|` plus the squared distance to the batch's chunk, a strong baseline.

Use it for offline data of one source, or of mixed quality with dense coverage. If most of the data are bad, the
imitation term is harmful: see prdc and a2pr. For multimodal data and other heads use iql or idql.

Deviations from the paper: the target is the minimum of the ensemble, which may have more than two members; chunks
replace single actions; observations are normalised by the policy's normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step, require_squashed
from robopolicy.algorithms.td3 import TD3Config, noisy_chunk, q1, smoothed_chunk
from robopolicy.constraints import NonNegative
from robopolicy.critics.q import TargetUpdate
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample, chunk_mean
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class TD3BCConfig(TD3Config):
    """Settings of TD3+BC; defaults are the paper's."""

    alpha: NonNegative = 2.5  # weight of the normalised values relative to the regulariser; 0: imitation


def regularized_loss(value: Tensor, penalty: Tensor, alpha: float) -> Tensor:
    """`mean penalty - alpha mean(Q) / mean|Q|` of values and penalties `(B,)`; the divisor has no gradient."""
    scale = alpha / value.detach().abs().mean().clamp(min=1e-6)
    return penalty.mean() - scale * value.mean()


def executed_actions(policy: GaussianPolicy, chunk: Tensor) -> Tensor:
    """Executed part `(..., n, A)` of `chunk` `(..., H, A)`, in normalised units."""
    return policy.action_normalizer.normalize(chunk[..., : policy.spec.action_horizon, :])


def chunk_distance(policy: GaussianPolicy, chunk: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Mean squared distance `(B,)` of the executed parts of two chunks, over the steps with `mask` `(B, H)`."""
    error = (executed_actions(policy, chunk) - executed_actions(policy, other)).square().mean(-1)  # (B, n)
    return chunk_mean(error, mask[:, : error.shape[1]])


class TD3BC(OffPolicy):
    """TD3 with an imitation term; a subclass may override `penalty`."""

    name = "td3_bc"
    config_class = TD3BCConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "fujimoto2021td3bc"
    needs_dataset: ClassVar[bool] = True
    config: TD3BCConfig
    policy: GaussianPolicy

    def __init__(self, config: TD3BCConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train the mode of a squashed Gaussian `policy`."""
        super().__init__(config, require_squashed(policy, self.name), total_updates=total_updates)
        refuse_unused(self.name, config, "action_l2", "value_reduction")
        self.target_policy: GaussianPolicy = frozen_copy(policy)
        self._policy_update = TargetUpdate(self.target_policy, policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw the mode with exploration noise."""
        return Sample.unscored(noisy_chunk(self.policy, obs, self.config, generator))

    def target(self, batch: Transitions) -> Tensor:
        """Value of the target policy's next chunk with clipped noise."""
        return self.bootstrap(batch, smoothed_chunk(self.target_policy, batch.next_obs, self.config, self.generator))

    def penalty(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Info]:
        """Regulariser `(B,)` of the actor's `chunk` `(B, H, A)`, the distance to the batch, and metrics; a hook."""
        return chunk_distance(self.policy, chunk, batch.chunk, batch.mask), {}

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Normalised values plus the regulariser, and metrics."""
        chunk = self.policy.mode(batch.obs)
        value = q1(self.critic, batch.obs, chunk)
        penalty, info = self.penalty(batch, chunk)
        return regularized_loss(value, penalty, self.config.alpha), {"penalty": penalty.mean(), **info}

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed actor steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))  # TD loss towards `target`, Adam, delayed Polyak
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                self._policy_update.step(self.config.target_policy_tau)
                self._policy_update.copy_buffers()
                stats.actor(loss=loss, **info)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, target policy and actor optimiser."""
        return {**super().checkpoint_items(), "target_policy": self.target_policy, "optimizer": self.optimizer}
