"""Bounded policy optimisation: regress every ratio onto the best one within bounds (Ao et al. 2026).

The policy improvement problem "most advantage with all ratios in [1 - eps, 1 + eps]" has a solution in closed form: the
bound itself, upper where an action is better than a threshold U(s) and lower where it is worse. With U the median of
the returns the two halves cancel and the target is a distribution; the value, a mean, would not do. A temperature
smooths the step. Where PPO stops pushing at its clip, BPO pulls back what has moved too far.

Use it in place of PPO, on any policy with a density. Its temperature is in units of (normalised) returns: with raw
rewards of another size, scale it. Not for a denoising head (`reinflow`, `dppo`).

The threshold is a smooth median. The width of its smoothing is a small share of the spread of the returns, whatever
their unit, so that the target ratios average 1.

Deviations: that share (there: a unit temperature, at which the median of returns of spread 1, as here, is nearly their
mean); value and threshold are those of the current networks in every minibatch, on returns that are computed once per
rollout (the code's variant for Isaac Lab computes them anew every epoch).
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class BPOConfig(ActorCriticConfig):
    """Settings of BPO; defaults are the public code's for MuJoCo unless noted here or in docs/methods/on_policy.md."""

    bound: OpenFraction = 0.3  # eps: target ratios lie in [1 - eps, 1 + eps]
    temperature: Positive = 0.001  # of the target, in units of the normalised return; towards 0 it is a step
    median_temperature: Positive = 0.03  # of the threshold, as a share of the spread of the returns in the minibatch
    batch_size: PositiveInt = 64  # decisions per minibatch
    grad_clip: Positive = 1.0  # largest norm of the joint gradient
    critic: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256), activation="relu"))


def median_loss(error: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """`T softplus(x / T) - x / 2` of `error` x = G - U: least where the mean of sigmoid(x / T) is 1/2."""
    return temperature * nn.functional.softplus(error / temperature) - error / 2


class BPO(PPO):
    """PPO's epochs on bounded target ratios and a second critic for their threshold."""

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
        """The value and the median."""
        return {**super().critics(), "median": self.median}

    def critic_loss(self, rows: RolloutBatch) -> Tensor:
        """Regression of the value, and of the median."""
        returns = rows.value_target
        spread = all_reduce_mean((returns - all_reduce_mean(returns.mean())).square().mean()).sqrt()
        temperature = (self.config.median_temperature * spread).clamp(min=1e-6)
        return super().critic_loss(rows) + median_loss(returns - self.median(rows.obs), temperature).mean()

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Distance of the ratios to their targets, weighted by the size of the advantage; minus the entropy bonus."""
        config, returns = self.config, rows.value_target
        output = self.policy.decisions(rows.obs, rows.record)
        change = (output.logp - rows.logp).sum(1)  # (B,) nats
        with torch.no_grad():
            low, high = 1 - config.bound, 1 + config.bound
            target = best_ratio(returns - self.median(rows.obs), low, high, config.temperature)
            weight = (returns - self.critic(rows.obs)).abs()
        ratio = change.exp()
        loss = ((ratio - target).abs() * weight).mean()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * output.entropy.sum(1).mean()
        return loss, self._diagnostics(change.detach(), output.entropy.detach()) if log_stats else {}

    def _diagnostics(self, change: Tensor, entropy: Tensor) -> Info:
        ratio = change.exp()
        outside = ((ratio - 1).abs() > self.config.bound).float().mean()
        return {"approx_kl": k3(-change).mean(), "outside": outside, "entropy": entropy.sum(1).mean()}
