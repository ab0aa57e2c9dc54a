"""AWM: advantage-weighted matching (Xue et al. 2025), adapted from images to action chunks.

The matching loss l of pretraining is weighted by the signed advantage of each sample. Like FPO++ it has one ratio
`exp(l_old - l)` per stored pair of noise and time, but with wide bounds (clip 1); the first gradient equals the one
of advantage-weighted matching. Two penalties on the squared velocity distance regularise the policy, a weak one to the
pretrained policy and a strong one to a delayed average of the policy. The times of a chunk are stratified over the
head's time distribution.

Use it when FPO's tight clip learns too slowly and rollouts are recent: with many epochs it drifts off-policy. It does
not support heads with learned step lengths (shortcut, MeanFlow) or offline data, because of its negative weights.

Deviations: prompts become observations, and group-normalised rewards become GAE advantages, normalised per minibatch;
losses come from stored pairs also in the first step; times are stratified over the whole distribution (there: 0.9 of 14
sampler steps); the delayed average is updated once per rollout, with the warm-up of the EMA for evaluation; the
gradient is clipped to norm 25 (there: 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fine_tuning import (
    FlowLossConfig,
    MonteCarloFlowLoss,
    actor_adam,
    clipped_step,
    cosine_rate,
    critic_adam,
    matching_losses,
    sampled_policy,
    velocity_distance,
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.algorithms.fpo import fpo_loss
from robopolicy.constraints import FractionBelowOne, NonNegative, Positive, PositiveInt
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.errors import unknown_name
from robopolicy.nets.module_state import EMA
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.sampled import SampledPolicy, require_supported
from robopolicy.policies.heads.generative import GenerativePolicy


def _power(loss: Tensor, t: Tensor, power: float) -> Tensor:
    # The shift keeps the gradient finite at a loss of 0.
    return ((loss + 1e-10) ** power - 1e-10**power) * (1 - t) / power


WEIGHTINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda loss, t, power: loss,
    "noise": lambda loss, t, power: loss * (1 - t),
    "power": _power,
}
"""Weightings of a loss `(B, N)` at times `(B, N)`: none, by the noise level, or by noise and a power (Huber: 0.5)."""


@dataclass(frozen=True)
class AWMConfig(FlowLossConfig):
    """Settings of AWM; its own defaults are the public code's unless noted."""

    num_mc_samples: PositiveInt = 6  # N, stored pairs of noise and time per chunk
    epochs: PositiveInt = 2  # passes over each rollout; the public code takes two steps
    clip: Positive = 1.0  # ratio bounds of every pair
    advantage_clip: Positive = 5.0  # normalised advantages are clipped to +- this and divided by it
    weighting: str = "uniform"  # uniform | noise (times 1 - t) | power (its power, times 1 - t); published: power
    power: Positive = 0.25  # of the loss, for weighting=power
    ref_coef: NonNegative = 0.003  # weight of the squared velocity distance to the pretrained policy
    ema_coef: NonNegative = 1.0  # weight of the squared velocity distance to the delayed average
    ema_decay: FractionBelowOne = 0.3  # largest weight of the old average in its update

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting not in WEIGHTINGS:
            raise unknown_name("weighting", self.weighting, WEIGHTINGS)


def awm_estimator(clip: float) -> Estimator:
    """Clipped surrogate on one ratio per pair."""
    return Estimator(EstimatorConfig(bounds=ConstantBounds(clip)))


class AWM(OnPolicy):
    """Policy gradient on per-sample ratios of matching losses with velocity penalties."""

    name = "awm"
    config_class = AWMConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "xue2025awm"
    distributed = True
    config: AWMConfig
    policy: SampledPolicy

    def __init__(self, config: AWMConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_supported(policy, "AWM")
        super().__init__(config, sampled_policy(head, config, stratified=True), total_updates=total_updates)
        self.base: GenerativePolicy = frozen_copy(head)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        size = config.batch_size
        self.flow_loss = MonteCarloFlowLoss(self.policy, self.logp, batch_size=size, generator=self.generator)
        self.estimator = awm_estimator(config.clip)
        self.average = EMA(self.policy.head, max_decay=config.ema_decay)

    def inference_policy(self) -> Policy:
        """The head without its exploration."""
        return self.policy.head

    def logp(self, rows: RolloutBatch) -> Tensor:
        """Minus the weighted loss `(B, N)` of each pair."""
        loss = matching_losses(self.policy, rows, self.config.reduction)
        return -WEIGHTINGS[self.config.weighting](loss, rows.record["t"], self.config.power)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Surrogate on one ratio per pair plus penalties, and metrics."""
        limit = self.config.advantage_clip
        advantage = normalize(rows.advantage).clamp(-limit, limit) / limit
        loss, info = fpo_loss(self.logp(rows), rows.logp, advantage, self.estimator)
        penalty, more = self.penalties(rows)
        return loss + penalty, info | more

    def penalties(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Weighted velocity distances to the pretrained policy and to the delayed average."""
        anchors = {"ref": (self.config.ref_coef, self.base), "ema": (self.config.ema_coef, self.average.module)}
        total, info = torch.zeros((), device=rows.advantage.device), {}
        if not any(weight for weight, _ in anchors.values()):
            return total, info
        velocity = self.policy.velocities(self.policy.head, rows.obs, rows.record)
        for name, (weight, head) in anchors.items():
            if weight:
                with torch.no_grad():
                    other = self.policy.velocities(head, rows.obs, rows.record)
                info[f"{name}_distance"] = distance = velocity_distance(velocity, other)
                total = total + weight * distance
        return total, info

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs of clipped updates on a rollout."""
        config = self.config
        self.update_reward_scale(batch)  # running standard deviation of the return
        rows = self.flow_loss.complete(self.process_rollout(batch))  # scaled rewards, GAE on V(s), stored points
        rate = cosine_rate(self.actor_optimizer, config, self.updates, self.total_updates)
        stats: dict[str, Any] = {"actor/lr": rate}
        epochs = Epochs(partial(self.minibatches, rows, batch.shape), config.epochs, self.actor_optimizer)
        for part, _ in epochs:
            with self.critic_in_background(part, stats):
                if self.updates < config.critic_warmup:
                    continue
                loss, info = self.loss(part)
                if epochs.stop(info, config.target_kl):
                    break
                stats |= clipped_step(self.actor_optimizer, loss, info, config.grad_clip)
        metrics = self.finish(batch, rows, stats | epochs.stats())
        self.average.update(self.policy.head)
        return metrics

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, frozen base, delayed average, optimisers and reward scale."""
        own = {"base": self.base, "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own, "average": self.average}
