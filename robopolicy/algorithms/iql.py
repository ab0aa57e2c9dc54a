"""Implicit Q-learning with advantage-weighted imitation of any policy (Kostrikov et al. 2021).

V(s) is an expectile of Q over the actions in the data, and Q regresses on V(s'), so no action outside the data is
evaluated. The policy imitates the data with weights exp(beta * (Q - V)) on its own loss: the denoising loss of a flow
or diffusion head, the log-likelihood of a Gaussian or autoregressive one.

Use it for offline data of mixed quality, and as a safe start of online fine-tuning. It can only reweight the data; to
exceed them use pa_rl or expo. With generative policies idql selects actions instead of weighting the loss.

Deviations from the paper: critics may be an ensemble with a subsampled minimum, one optimiser trains Q and V jointly,
chunks replace single actions, and the weight multiplies any imitation loss, not only a log-likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats
from robopolicy.algorithms.common.offline import (
    ImitationConfig,
    ImplicitConfig,
    ImplicitObjective,
    imitation_step,
    require_imitation,
)
from robopolicy.algorithms.common.td_loss import td_loss
from robopolicy.constraints import NonNegative, Positive
from robopolicy.critics.q import CriticConfig
from robopolicy.critics.value import advantage_weight
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class IQLConfig(ImitationConfig):
    """Settings of IQL; defaults are the paper's for locomotion."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    beta: NonNegative = 3.0  # inverse temperature of the weights; 0: imitation, 10 for sparse rewards
    weight_max: Positive = 100.0  # largest weight


class IQL(OffPolicy):
    """Expectile critics and advantage-weighted imitation."""

    name = "iql"
    config_class = IQLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "kostrikov2021iql"
    supports_rho = True
    config: IQLConfig

    def __init__(self, config: IQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is active only in its own loss
        self.objective = ImplicitObjective(config.implicit, policy)
        self.critic_optimizer.add_param_group({"params": list(self.objective.parameters())})
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the policy."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * V(next_obs)`."""
        return self.objective.target(batch)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of Q to V, and expectile regression of V on the target ensemble."""
        loss, info = td_loss(self.critic, batch, self.target)
        value_loss, more = self.objective.value_loss(batch, self.q_values(batch))
        return loss + value_loss, info | more

    @torch.no_grad()
    def weights(self, batch: Transitions) -> Tensor:
        """Imitation weights `exp(beta * (Q - V))` `(B,)` of the batch's chunks."""
        advantage = self.q_values(batch) - self.objective.value(batch.obs)
        return advantage_weight(advantage, self.config.beta, self.config.weight_max)

    def update(self, batch: Transitions) -> Metrics:
        """Take steps of Q and V on consecutive minibatches, with delayed weighted imitation steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                weight = self.weights(part)
                loss = imitation_step(self, part.obs, part.chunk, weight, mask=part.mask)
                stats.actor(loss=loss, weight=weight.mean(), weight_max=weight.max())
        return self.finish(batch, stats)

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class and V."""
        return *super().observers(), self.objective

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, policy optimiser and V."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer, "rule": self.objective}
