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

from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.frames.offline_critic import ConservativeConfig, ConservativeRule
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import Count, Positive
from robopolicy.critics.q import CriticConfig, random_subset_min
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class CalQLConfig(SACConfig):
    """Settings of Cal-QL; defaults are the public code's for sparse rewards."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256, 256, 256), activation="relu", layer_norm=False)
    )
    lr: Positive = 1e-4  # learning rate of the actor
    conservative: ConservativeConfig = field(default_factory=ConservativeConfig)  # penalty; weight 1 with dense data
    backup_entropy: bool = False  # entropy in the critic's target, of the best candidate
    candidates: Count = 10  # chunks of the policy per row, in the penalty and for the best one in the target


class CalQL(SAC):
    """SAC with a calibrated conservative critic."""

    name = "cal_ql"
    config_class = CalQLConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "nakamoto2023calql"
    needs_bounds = True
    config: CalQLConfig

    def __init__(self, config: CalQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, policy, total_updates=total_updates)
        self.config: CalQLConfig = config
        self.rule = ConservativeRule(config.conservative, self.generator)

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the policy, which has been pretrained offline or imitates."""
        return self.act(obs, generator=generator)

    def sampled(self, obs: Observation) -> Tensor:
        """Chunks `(B, C, H, A)` of the policy."""
        return self.policy.draws(obs, self.config.candidates, generator=self.generator)

    def target(self, batch: Transitions) -> Tensor:
        """Bootstrap from the best of the sampled next chunks."""
        chunks = self.sampled(batch.next_obs)
        values = self.target_critic.of_candidates(batch.next_obs, chunks)  # (M, B, C)
        best = random_subset_min(values, self.config.target_members, self.generator).max(1)
        value = batch.reward + batch.discount * best.values
        if not self.config.backup_entropy:
            return value
        chunk = chunks[torch.arange(len(chunks), device=chunks.device), best.indices]
        return self.soft(batch, value, self.policy.log_density(batch.next_obs, chunk))

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss and the calibrated penalty."""
        loss, info = super().critic_loss(batch)
        extra, more = self.rule.penalty(batch, self.critic, self.sampled(batch.obs))
        return loss + extra, info | more
