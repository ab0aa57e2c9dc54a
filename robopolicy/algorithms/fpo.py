"""FPO: flow matching policy gradients (McAllister et al. 2025).

PPO's clipped policy gradient with the flow-matching loss l in place of a log-probability. N pairs of noise and time are
drawn and stored per chunk, and its ratio is `exp(mean(l_old - l))` over the pairs. l is an upper bound of the negative
log-likelihood up to a constant, so raising the ratio of good chunks raises their likelihood. The sampler is arbitrary
and is never differentiated.

Use it to train or fine-tune a flow, diffusion or EDM policy without densities of chains: with many sampler steps or a
deterministic sampler. It does not support heads with learned step lengths (shortcut, MeanFlow). For fine-tuning
FPO++ has one ratio per pair; late collapse of FPO is reported from scratch (GoRL, Zhang et al. 2025).

Deviations from the public code: the head's own training loss is used (published: velocity prediction, supervised as
noise); the loss is averaged over the executed steps; times follow the head's time distribution (published: the grid of
the sampler); truncated episodes bootstrap from their last observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.constraints import Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.sampled import SampledPolicy, require_supported
from robopolicy.policies.heads.generative import GenerativePolicy


@dataclass(frozen=True)
class FPOConfig(FlowLossConfig):
    """Settings of FPO; clip and num_mc_samples are the paper's."""

    clip: Positive = 0.05  # ratio bounds on the mean difference of losses


def fpo_estimator(clip: float) -> Estimator:
    """Clipped surrogate on one ratio per chunk, the geometric mean over its pairs."""
    return Estimator(EstimatorConfig(level="unit", reduction="mean", bounds=ConstantBounds(clip)))


def fpo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, estimator: Estimator) -> tuple[Tensor, Info]:
    """Surrogate on minus the losses `(B, N)` and the stored ones, with one advantage per chunk `(B,)`."""
    return estimator(Decisions(logp_old), advantage, logp)


class FPO(OnPolicy):
    """PPO on ratios of flow-matching losses."""

    name = "fpo"
    config_class = FPOConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "mcallister2025fpo"
    distributed = True
    config: FPOConfig
    policy: SampledPolicy

    def __init__(self, config: FPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_supported(policy, "FPO")
        super().__init__(config, sampled_policy(head, config), total_updates=total_updates)
        self.base: GenerativePolicy = frozen_copy(head)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        size = config.batch_size
        self.flow_loss = MonteCarloFlowLoss(self.policy, self.logp, batch_size=size, generator=self.generator)
        self.estimator = fpo_estimator(config.clip)

    def inference_policy(self) -> Policy:
        """The head without its exploration."""
        return self.policy.head

    def logp(self, rows: RolloutBatch) -> Tensor:
        """Minus the loss `(B, N)` of each pair."""
        return -matching_losses(self.policy, rows, self.config.reduction)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Clipped surrogate on one ratio per chunk with advantages normalised per minibatch, and metrics."""
        return fpo_loss(self.logp(rows), rows.logp, normalize(rows.advantage), self.estimator)

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
