"""Bounded policy optimisation: regress every ratio onto the best ratio within bounds (Ao et al. 2026).

The problem "maximise the advantage with all ratios in [1 - eps, 1 + eps]" has a closed-form solution: the upper bound
where the return of an action exceeds a threshold U(s), the lower bound elsewhere. With U the median of the returns the
two halves cancel and the target is a distribution; the mean would not have this property. A temperature smooths the
step. PPO has no gradient beyond its clip; BPO pulls ratios back that moved beyond it.

Use it in place of PPO, on any policy with a density. The temperature is in units of (normalised) returns, so scale it
with raw rewards of another size. It does not support denoising heads (`reinflow`, `dppo`).

The threshold is a smooth median. The width of its smoothing is a small fraction of the standard deviation of the
returns, independent of their unit, so that the target ratios average 1.

Deviations: this fraction (the paper: a unit temperature, at which the median of returns of unit variance is nearly
their mean); every minibatch takes value and threshold from the current networks, on returns that are computed once per
rollout (the code's variant for Isaac Lab recomputes them every epoch).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.on_policy import ActorCriticConfig
from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.algorithms.ppo import PPO
from robopolicy.constraints import OpenFraction, Positive, PositiveInt
from robopolicy.core.distributed import all_reduce_mean
from robopolicy.core.regularizers import k3
from robopolicy.core.surrogates import best_ratio
from robopolicy.critics.q import copy_statistics
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class BPOConfig(ActorCriticConfig):
    """Settings of BPO; defaults are the public code's for MuJoCo unless noted here or in docs/methods/on_policy.md."""

    bound: OpenFraction = 0.3  # eps: target ratios lie in [1 - eps, 1 + eps]
    temperature: Positive = 0.001  # of the target, in units of the normalised return; the limit 0 is a step
    median_temperature: Positive = 0.03  # of the threshold, relative to the standard deviation of the returns
    batch_size: PositiveInt = 64  # decisions per minibatch
    grad_clip: Positive = 1.0  # maximum norm of the joint gradient
    critic: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256), activation="relu"))


def median_loss(error: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """`T softplus(x / T) - x / 2` of `error` x = G - U; its minimum has the mean of sigmoid(x / T) at 1/2."""
    return temperature * nn.functional.softplus(error / temperature) - error / 2


class BPO(PPO):
    """PPO with bounded target ratios and a second critic for their threshold."""

    name = "bpo"
    config_class = BPOConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "ao2026bounded"
    distributed = True
    config: BPOConfig

    def __init__(self, config: BPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        self.median = ValueNet(config.critic, policy.spec)
        copy_statistics(self.median.encoder, policy)
        super().__init__(config, policy, total_updates=total_updates)

    def critics(self) -> dict[str, ValueNet]:
        """Critics of the value and of the median."""
        return {**super().critics(), "median": self.median}

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Rows with importance weights in place of the advantages, which the loss computes again."""
        weight = torch.ones_like(batch.reward) if batch.weight is None else batch.weight
        return replace(super().process_rollout(batch), advantage=weight.flatten())

    def critic_loss(self, rows: RolloutBatch) -> Tensor:
        """Regression losses of the value and of the median."""
        returns = rows.value_target
        spread = all_reduce_mean((returns - all_reduce_mean(returns.mean())).square().mean()).sqrt()
        temperature = (self.config.median_temperature * spread).clamp(min=1e-6)
        return super().critic_loss(rows) + median_loss(returns - self.median(rows.obs), temperature).mean()

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Distance of the ratios to their targets, weighted by importance and `|A|`, minus the entropy bonus."""
        config, returns = self.config, rows.value_target
        output = self.policy.decisions(rows.obs, rows.record)
        change = (output.logp - rows.logp).sum(1)  # (B,) nats
        with torch.no_grad():
            low, high = 1 - config.bound, 1 + config.bound
            target = best_ratio(returns - self.median(rows.obs), low, high, config.temperature)
            weight = rows.advantage * (returns - self.critic(rows.obs)).abs()
        ratio = change.exp()
        loss = ((ratio - target).abs() * weight).mean()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * output.entropy.sum(1).mean()
        return loss, self._diagnostics(change.detach(), output.entropy.detach()) if log_stats else {}

    def _diagnostics(self, change: Tensor, entropy: Tensor) -> Info:
        ratio = change.exp()
        outside = ((ratio - 1).abs() > self.config.bound).float().mean()
        return {"approx_kl": k3(-change).mean(), "outside": outside, "entropy": entropy.sum(1).mean()}
