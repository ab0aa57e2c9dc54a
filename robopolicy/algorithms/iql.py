"""Implicit Q-learning with advantage-weighted imitation of any policy (Kostrikov et al. 2021).

V(s) is an expectile of Q over the actions in the data, Q regresses on V(s'), so no action outside the data is ever
evaluated. The policy imitates the data with weights exp(beta * (Q - V)): a flow or diffusion head weights its denoising
loss, a Gaussian or autoregressive one its log-likelihood.

Use it for offline data of mixed quality, and as a safe start for online fine-tuning. It can only reweight what the data
shows; to go beyond it use pa_rl or expo. With a generative policy idql is usually better than weighting its loss.

Deviations from the paper: critics may be an ensemble with a subsampled minimum, one optimiser steps Q and V at once,
chunks replace single actions, and the weight multiplies whatever loss the head has, not only a log-likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.frames.offline_critic import ImplicitConfig, ImplicitRule, OfflineCritic, OfflineCriticConfig
from robopolicy.constraints import NotNegative, Positive
from robopolicy.critics.q import CriticConfig
from robopolicy.critics.value import advantage_weight
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class IQLConfig(OfflineCriticConfig):
    """Settings of IQL; defaults are the paper's for locomotion."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    beta: NotNegative = 3.0  # inverse temperature of the weights; 0 is plain imitation, 10 for sparse rewards
    weight_max: Positive = 100.0  # bound on the weights


class IQL(OfflineCritic):
    """Expectile critics, advantage-weighted imitation."""

    name = "iql"
    config_class = IQLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "kostrikov2021iql"
    config: IQLConfig
    rule: ImplicitRule

    def make_rule(self) -> ImplicitRule:
        """V by expectile regression."""
        return ImplicitRule(self.config.implicit, self.policy)

    @torch.no_grad()
    def weights(self, batch: Transitions) -> Tensor:
        """Imitation weights `(B,)` of the batch's chunks."""
        advantage = self.judge(batch) - self.rule.value(batch.obs)
        return advantage_weight(advantage, self.config.beta, self.config.weight_max)

    def actor_step(self, batch: Transitions) -> Info:
        """Weighted imitation of the batch."""
        weight = self.weights(batch)
        loss = self.imitate(batch.obs, batch.chunk, weight, batch.mask)
        return {"loss": loss, "weight": weight.mean(), "weight_max": weight.max()}
