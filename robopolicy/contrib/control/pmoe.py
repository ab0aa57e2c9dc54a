"""Probabilistic mixture-of-experts for reinforcement learning: soft actor-critic with several experts.

A choice among experts cannot be reparameterised, and PMOE does not differentiate through it: every expert proposes a
chunk, the critic selects the best one, and only this expert is improved. The router learns by regression how often each
expert is the best (the frequency loss). Experts can represent different optima, between which one Gaussian would have
to choose or average. Source: Ren et al. 2021, PMOE.

Use it from scratch where a task has a few distinct solutions. For one solution SAC is cheaper, because the critic
evaluates all experts in every actor step. Experts that are never the best are never improved; the router entropy in the
metrics shows a collapse. `pmoe_ppo` is the variant for rollouts.

The formulas follow the authors' public code. Deviations: rewards are not standardised per batch (the temperature is
learned instead), critics may be an ensemble, and actions come in chunks as in SAC. As in the code, the objective
contains the entropy of the chosen expert; the metrics also show the entropy of the mixture, which is larger where
experts differ.
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
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, make_adam, optimizer_step
from robopolicy.algorithms.sac import soft_target
from robopolicy.constraints import NonNegative
from robopolicy.critics.q import QEnsemble
from robopolicy.data.replay import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.density import sample_category
from robopolicy.policies.heads.mixture import MixturePolicy
from robopolicy.policies.noise import Randomness, uniform


@dataclass(frozen=True)
class PMOEConfig(MaxEntropyConfig):
    """Settings of PMOE: settings of SAC and of the router."""

    router_coef: NonNegative = 1.0  # weight of the frequency loss


def frequency_loss(log_weight: Tensor, best: Tensor) -> tuple[Tensor, Info]:
    """Squared error of the router `(B, M)` to a one-hot of the best expert `(B,)`; its minimum is the frequency."""
    weight = log_weight.exp()
    target = torch.nn.functional.one_hot(best, weight.shape[1]).to(weight.dtype)
    entropy = -(weight * log_weight).sum(1).mean().detach()
    return (weight - target).square().mean(), {"router_entropy": entropy}


def actor_loss(
    policy: MixturePolicy, critic: QEnsemble, obs: Observation, alpha: Tensor, router_coef: float, generator: Randomness
) -> tuple[Tensor, Info]:
    """`alpha log pi_b - min Q` of the best expert b, plus the frequency loss; `info["logp"]` `(B,)` belongs to b."""
    chunks, logp, log_weight = policy.rsample_experts(obs, generator=generator)  # (B, M, H, A), (B, M), (B, M)
    value, best = critic.candidate_values(obs, chunks).min(0).values.max(1)  # (B,)
    logp = logp.gather(1, best.unsqueeze(1)).squeeze(1)
    router, info = frequency_loss(log_weight, best)
    loss = (alpha * logp - value).mean() + router_coef * router
    return loss, {**info, "router_loss": router.detach(), "logp": logp.detach()}


class PMOE(OffPolicy):
    """Soft actor-critic for a mixture of experts."""

    name = "pmoe"
    config_class = PMOEConfig
    data_source = "replay"
    heads = ("squashed_mixture",)
    reference = "ren2021pmoe"
    config: PMOEConfig
    policy: MixturePolicy

    def __init__(self, config: PMOEConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed mixture `policy`."""
        if not isinstance(policy, MixturePolicy) or not policy.config.squash:
            raise UserError(f"PMOE trains a squashed mixture, got '{policy.name}'; pass policy=squashed_mixture.")
        super().__init__(config, policy, total_updates=total_updates)
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, executed_dims(policy))
        self.optimizer = make_adam(policy, config.lr, config.weight_decay)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation, at a chunk of an expert drawn by the router."""
        chunks, logp, log_weight = self.policy.rsample_experts(batch.next_obs, generator=self.generator)
        drawn = sample_category(log_weight, uniform((len(logp), 1), self.generator, logp.device).squeeze(1))
        rows = torch.arange(len(logp), device=logp.device)
        value = self.next_value(batch, chunks[rows, drawn])
        return soft_target(batch, value, logp[rows, drawn], self.temperature.value, self.config)

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with steps of experts, router and temperature in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                stats.actor(**self.actor_step(part))
        return self.finish(batch, stats)

    def actor_step(self, batch: Transitions) -> Info:
        """Take one step of the best experts, the router and the temperature, by the entropy of the best experts."""
        alpha = self.temperature.value
        loss, info = actor_loss(self.policy, self.critic, batch.obs, alpha, self.config.router_coef, self.generator)
        logp = info.pop("logp")
        with torch.no_grad():
            sample = self.policy.sample(batch.obs, generator=self.generator)
        optimizer_step(self.optimizer, loss)
        self.temperature.step(logp, self.target_entropy)
        entropies = {"entropy": -sample.logp.mean(), "expert_entropy": -logp.mean()}
        return {"loss": loss, "temperature": alpha, **info, **entropies}

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature and actor optimiser."""
        return {**super().checkpoint_items(), **self.temperature.checkpoint_items(), "optimizer": self.optimizer}
