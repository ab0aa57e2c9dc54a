"""TD3+BC: TD3 on a dataset, with an actor that also imitates the actions of its batch (Fujimoto and Gu 2021).

The loss of the actor is `-alpha Q(s, pi(s)) / mean|Q|` plus the squared distance to the batch's chunk. That is all, and
a strong baseline.

Use it for offline data of one source, or of mixed quality with dense coverage. Where most of the data is bad, the bad
half holds the actor back as much as the good one helps: see prdc and a2pr. For multimodal data and any other head take
iql or idql.

Deviations from the paper: the target takes the least of the ensemble, of which there may be more than two; chunks
replace single actions; observations are normalised as the policy says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
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

    alpha: NonNegative = 2.5  # weight of the normalised values beside the regulariser; 0 only imitates


def regularized_loss(value: Tensor, penalty: Tensor, alpha: float) -> Tensor:
    """`mean penalty - alpha mean(Q) / mean|Q|` of values and penalties `(B,)`; the divisor has no gradient."""
    scale = alpha / value.detach().abs().mean().clamp(min=1e-6)
    return penalty.mean() - scale * value.mean()


def executed_actions(policy: GaussianPolicy, chunk: Tensor) -> Tensor:
    """The executed part `(..., n, A)` of `chunk` `(..., H, A)`, in normalised units."""
    return policy.action_normalizer.normalize(chunk[..., : policy.spec.action_horizon, :])


def chunk_distance(policy: GaussianPolicy, chunk: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Mean squared distance `(B,)` of the executed parts of two chunks, over the steps with `mask` `(B, H)`.

    Only the executed part of a chunk has a value, so only that is held near the data.
    """
    error = (executed_actions(policy, chunk) - executed_actions(policy, other)).square().mean(-1)  # (B, n)
    return chunk_mean(error, mask[:, : error.shape[1]])


class TD3BC(OffPolicy):
    """TD3 that imitates its batch; a subclass may hold the actor near other chunks by its own `penalty`."""

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
        self.target_policy: GaussianPolicy = frozen_copy(policy)
        self._policy_update = TargetUpdate(self.target_policy, policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The mode with noise."""
        return Sample.unscored(noisy_chunk(self.policy, obs, self.config, generator))

    def target(self, batch: Transitions) -> Tensor:
        """Value of the target policy's next chunk with clipped noise."""
        return self.bootstrap(batch, smoothed_chunk(self.target_policy, batch.next_obs, self.config, self.generator))

    def penalty(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Info]:
        """Regulariser `(B,)` of the actor's `chunk` `(B, H, A)`, and what to log: the distance to the batch; a hook."""
        return chunk_distance(self.policy, chunk, batch.chunk, batch.mask), {}

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Normalised values against the regulariser."""
        chunk = self.policy.mode(batch.obs)
        value = q1(self.critic, batch.obs, chunk)
        penalty, info = self.penalty(batch, chunk)
        return regularized_loss(value, penalty, self.config.alpha), {"penalty": penalty.mean(), **info}

    def update(self, batch: Transitions) -> Metrics:
        """Critic steps on consecutive minibatches, delayed steps of the actor in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))  # TD loss towards `target`, Adam, Polyak
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                self._policy_update.step(self.config.tau)
                self._policy_update.copy_buffers()
                stats.actor(loss=loss, **info)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the target policy and the optimiser of the actor."""
        return {**super().checkpoint_items(), "target_policy": self.target_policy, "optimizer": self.optimizer}
