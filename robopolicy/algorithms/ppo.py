"""Proximal policy optimisation (Schulman et al. 2017) for policies with a density, with or without chunks.

Clipped surrogate on one ratio per decision, GAE, value regression, several epochs of minibatches. Defaults and order of
operations follow Stable-Baselines3, so returns are comparable at equal hyper-parameters; the differences are:

* time limits bootstrap from the value of the true last observation, and cut the trace;
* rewards may be divided by a running standard deviation of the return (`normalize_reward`), observations by the
  policy's running normaliser, which is updated after the epochs so that the first ratio is exactly 1.

Use it for control from scratch. For a diffusion or flow policy use ReinFlow, which scores the denoising chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.on_policy import (
    ActorCriticConfig,
    OnPolicy,
    adapt_rate,
    joint_step,
    learning_rate,
    prefixed,
    schedule_rate,
    value_loss,
)
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.algorithms.common.symmetry import Symmetry, with_image
from robopolicy.constraints import Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.distributed import all_reduce_mean
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.gradients import backward
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Settings of PPO."""

    clip: Positive = 0.2  # ratio bounds 1 - clip, 1 + clip


def ppo_estimator(config: PPOConfig) -> Estimator:
    """Build the clipped surrogate with an entropy bonus."""
    return Estimator(EstimatorConfig(bounds=ConstantBounds(config.clip), entropy_coef=config.entropy_coef))


def ppo_loss(
    policy: Policy, rows: RolloutBatch, estimator: Estimator, *, log_stats: bool = True
) -> tuple[Tensor, Info]:
    """Clipped surrogate minus the entropy bonus on one minibatch; advantages are normalised within it."""
    output = policy.decisions(rows.obs, rows.record)
    advantage = normalize(rows.advantage)[:, None]
    return estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, log_stats=log_stats)


class PPO(OnPolicy):
    """PPO with a separate value network and one optimiser for both."""

    name = "ppo"
    config_class = PPOConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "schulman2017ppo"
    distributed = True
    supports_recurrent = True
    config: PPOConfig

    def __init__(
        self,
        config: ActorCriticConfig,
        policy: Policy,
        *,
        total_updates: int,
        regularizer: Callable[[Observation], tuple[Tensor, Info]] | None = None,
    ) -> None:
        """Prepare to train `policy` in place for `total_updates` rollouts.

        `config` is a `PPOConfig` unless a subclass overrides `estimator` or `loss`; `regularizer` returns a loss on
        observations, which is added to the surrogate, and metrics.
        """
        super().__init__(config, policy, total_updates=total_updates)
        learned = [p for net in (policy, *self.critics().values()) for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(learned, lr=config.lr, eps=1e-5, fused=True)
        self.symmetry: Symmetry | None = None
        self.regularizer = regularizer

    @cached_property
    def estimator(self) -> Estimator:
        """Surrogate objective; a hook."""
        return ppo_estimator(self.config)

    def attach_symmetry(self, mirror: MirrorSymmetry | None) -> None:
        """Add mirrored minibatches or a mirror loss, as configured."""
        if self.config.symmetry.used:
            self.symmetry = Symmetry(self.config.symmetry, mirror, self.policy, list(self.critics().values()))

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk and, from a recurrent policy, its next hidden state."""
        sample = super().act(obs, generator=generator)
        return replace(sample, memory=self.policy.next_hidden(obs)) if self.policy.spec.hidden_dim else sample

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Actor loss of a minibatch and, with `log_stats`, metrics including `approx_kl`; a hook."""
        loss, info = ppo_loss(self.policy, rows, self.estimator, log_stats=log_stats)
        if self.regularizer is None:
            return loss, info
        extra, more = self.regularizer(rows.obs)
        return loss + extra, info | more

    def critic_loss(self, rows: RolloutBatch) -> Tensor:
        """Regression of V(s), weighted by `value_coef` later; a hook."""
        return value_loss(self.critic(rows.obs), rows, self.config.value_clip)

    def critic_gradient(self, rows: RolloutBatch, image: RolloutBatch | None) -> Tensor:
        """Add the gradient of the weighted critic loss; returns the loss."""
        loss = with_image(self.critic_loss, rows, image)
        backward(loss, weight=self.config.value_coef)
        return loss.detach()

    def minibatch_loss(
        self, rows: RolloutBatch, image: RolloutBatch | None, steps: int, *, log_stats: bool
    ) -> tuple[Tensor, Info]:
        """`loss` of rows from `steps` time steps, with mirror images and mirror loss if configured, and metrics."""
        if isinstance(self.policy, ExplicitPolicy) and self.policy.cell is not None:
            rows = replace(rows, obs=self.policy.unroll_rnn(rows.obs, steps))
        loss, info = self.loss(rows, log_stats=log_stats)  # the KL is of the original decisions
        if image is not None:
            loss = (loss + self.loss(image, log_stats=False)[0]) / 2
        if self.symmetry is None or not self.config.symmetry.mirror_coef:
            return loss, info
        extra, more = self.symmetry.mirror_loss(rows.obs)
        return loss + extra, info | more

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs of joint gradient steps on a rollout."""
        config = self.config
        if config.symmetry.used and self.symmetry is None:
            raise UserError("algorithm.symmetry is set; call attach_symmetry before update.")
        self.update_reward_scale(batch)  # running standard deviation of the return
        rows = self.process_rollout(batch)  # scaled rewards, GAE on V(s), rows (B, ...)
        schedule_rate(self.optimizer, config, self.progress)
        stats: dict[str, Any] = {}
        epochs = Epochs(partial(self.minibatches, rows, batch.shape), config.epochs, self.optimizer)
        for part, last in epochs:
            image = None if self.symmetry is None else self.symmetry.image(part)
            self.optimizer.zero_grad(set_to_none=True)
            self.worker.start(self.critic_gradient, part, image)  # on a second thread
            log_stats = last or config.target_kl is not None
            loss, info = self.minibatch_loss(part, image, batch.shape[0], log_stats=log_stats)
            backward(loss)
            stats |= {"critic/loss": self.worker.wait(), **prefixed("actor", info)}
            if config.target_kl is not None:
                if config.lr_schedule == "adaptive":
                    adapt_rate(self.optimizer, all_reduce_mean(info["approx_kl"]), config.target_kl)
                elif epochs.stop(info, 1.5 * config.target_kl):
                    break
            joint_step(self.optimizer, config.grad_clip)  # mean over processes, joint clip, Adam
        stats |= epochs.stats() | {"actor/lr": learning_rate(self.optimizer)}
        return self.finish(batch, rows, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, optimiser and reward scale."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer}
