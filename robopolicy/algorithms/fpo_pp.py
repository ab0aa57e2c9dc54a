"""FPO++: flow policy gradients for robots (Yi et al. 2026).

FPO with four changes for locomotion and manipulation. Every stored pair of noise and time has its own clipped ratio
`exp(l_old - l)`. Losses and their differences are bounded before the exponential. The loss is Huber's. From scratch,
ASPO replaces the clip: a quadratic penalty raises the ratios of chunks with negative advantage that have left the trust
region, where PPO's gradient is zero. Evaluation starts the sampler from zero noise.

Use it to fine-tune a flow, diffusion or EDM policy with sparse rewards, or from scratch with trust_region=aspo. It does
not support heads with learned step lengths (shortcut, MeanFlow). Set zero_noise=false to deploy several modes.

Deviations from the public code: Huber's loss applies to the root mean square error of each action, not to each
dimension, so that it is independent of the head's loss; both the old and the new loss are bounded, as in the published
locomotion code (its manipulation code bounds only the old one, so first ratios are not 1); all executed steps count,
also when the episode ends within the chunk; values and GAE are per decision (there: per control step, so that the
published lambda of 0.99 is 0.85 per chunk of 16 steps); the gradient is clipped to norm 25 (there: 1).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    reduce_steps,
    sampled_policy,
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.algorithms.fpo import fpo_loss
from robopolicy.constraints import NonNegative, Positive
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.sampled import SampledPolicy, require_supported
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy

TRUST_REGIONS = ("clip", "aspo")


@dataclass(frozen=True)
class FPOPlusPlusConfig(FlowLossConfig):
    """Settings of FPO++; its own defaults are the paper's for manipulation, inherited ones are not."""

    reduction: str = "sum"  # of the loss over the executed steps of a chunk: mean | sum
    clip: Positive = 0.02  # ratio bounds of every pair; the paper tunes it between 0.01 and 0.03
    trust_region: str = "clip"  # clip (fine-tuning) | aspo (from scratch)
    huber_delta: NonNegative = 0.5  # error from which the loss is linear; 0: always quadratic
    loss_clamp: Positive | None = 4.0  # largest loss of a pair and step; no gradient beyond
    ratio_clamp: Positive | None = 5.0  # largest change of a loss, with a straight-through gradient
    zero_noise: bool = True  # deploy the sampler with zero initial noise

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trust_region not in TRUST_REGIONS:
            raise unknown_name("trust region", self.trust_region, TRUST_REGIONS)


def huber(squared: Tensor, delta: float) -> Tensor:
    """Huber's loss of mean squared errors: unchanged up to `delta` squared, linear in the error beyond."""
    if not delta:
        return squared
    # The root has an infinite slope at 0, which would give NaN gradients even in the unused branch.
    root = squared.clamp(min=delta**2).sqrt()
    return torch.where(squared <= delta**2, squared, 2 * delta * root - delta**2)


def straight_through_clamp(x: Tensor, limit: float) -> Tensor:
    """Clamp `x` to +-limit with the gradient of `x`."""
    return x + (x.clamp(-limit, limit) - x).detach()


class FPOPlusPlus(OnPolicy):
    """Per-sample ratios of bounded Huber losses, clipped or with ASPO."""

    name = "fpo_pp"
    config_class = FPOPlusPlusConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "yi2026fpopp"
    distributed = True
    config: FPOPlusPlusConfig
    policy: SampledPolicy

    def __init__(self, config: FPOPlusPlusConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_supported(policy, "FPO++")
        super().__init__(config, sampled_policy(head, config), total_updates=total_updates)
        self.base: GenerativePolicy = frozen_copy(head)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        size = config.batch_size
        self.flow_loss = MonteCarloFlowLoss(self.policy, self.logp, batch_size=size, generator=self.generator)
        self.estimator = Estimator(EstimatorConfig(bounds=ConstantBounds(config.clip), surrogate=config.trust_region))

    def inference_policy(self) -> Policy:
        """The head, with zero initial noise if configured."""
        return ZeroNoisePolicy.wrap(self.policy.head) if self.config.zero_noise else self.policy.head

    def logp(self, rows: RolloutBatch) -> Tensor:
        """Minus the bounded Huber loss `(B, N)` of each pair."""
        config = self.config
        loss = huber(self.policy.losses(rows.obs, rows.record), config.huber_delta)
        if config.loss_clamp is not None:
            loss = loss.clamp(max=config.loss_clamp)
        return -reduce_steps(loss, config.reduction)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Surrogate on one ratio per pair with advantages normalised per minibatch, and metrics."""
        logp, limit = self.logp(rows), self.config.ratio_clamp
        if limit is not None:
            logp = rows.logp + straight_through_clamp(logp - rows.logp, limit)
        return fpo_loss(logp, rows.logp, normalize(rows.advantage), self.estimator)

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
        return self.finish(batch, rows, stats | epochs.stats())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, frozen base, optimisers and reward scale."""
        own = {"base": self.base, "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own}
