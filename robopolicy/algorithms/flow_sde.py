"""Flow-SDE: PPO with a critic on the stochastic sampler of a flow policy (Flow-SDE of piRL, arXiv 2510.25889).

It is Flow-GRPO with GAE advantages on V(s) instead of group advantages: every decision has its own credit, and episodes
need not restart from one state. Unlike in ReinFlow, the noise is a function of the flow's time instead of learned, and
each denoising step has its own ratio instead of one per chain.

Use it for long episodes or simulators that cannot repeat a start state, if ReinFlow's noise network is not desired. Do
not use it with one-step heads, whose only step has noise `noise_level`.

Reconstructed from the equations of Flow-GRPO and the description of piRL, without its variant with noise in one random
step per chunk; its published results are on vision-language-action models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fine_tuning import (
    ChainConfig,
    ChainRecorder,
    FineTuningConfig,
    actor_adam,
    clipped_step,
    cosine_rate,
    critic_adam,
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.algorithms.flow_grpo import sde_loss
from robopolicy.constraints import NonNegative, Positive
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.exploration.chain import require_family
from robopolicy.policies.exploration.flow_chains import SDEChain
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class FlowSDEConfig(ChainConfig, FineTuningConfig):
    """Settings of Flow-SDE."""

    noise_level: Positive = 0.3  # c of the injected noise c sqrt((1 - t) / t)
    clip: Positive = 0.01  # ratio bounds per denoising step
    kl_coef: NonNegative = 0.0  # weight of the KL to the frozen base, per dimension
    lr: Positive = 1e-4  # peak learning rate of the actor


class FlowSDE(OnPolicy):
    """PPO on the stochastic sampler of a flow policy."""

    name = "flow_sde"
    config_class = FlowSDEConfig
    data_source = "rollout"
    heads = ("flow", "shortcut", "meanflow")
    reference = "chen2025pirl"
    distributed = True
    config: FlowSDEConfig
    policy: SDEChain

    def __init__(self, config: FlowSDEConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_family(policy, ("flow",), "Flow-SDE", "use dppo for diffusion and ppo for a Gaussian")
        super().__init__(config, SDEChain(head, config.noise_level), total_updates=total_updates)
        self.base, self.recorder = frozen_copy(head), ChainRecorder(self.policy, config)
        self.reference_policy = SDEChain(self.base, config.noise_level)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        self.estimator = Estimator(EstimatorConfig(bounds=ConstantBounds(config.clip)))

    def inference_policy(self) -> Policy:
        """The fine-tuned flow, sampled by its ODE."""
        return self.policy.head

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration and record its chain."""
        return self.recorder.sample(obs, generator=generator)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Clipped surrogate on one ratio per step plus the KL to the base, and metrics."""
        advantage = normalize(rows.advantage)
        return sde_loss(self.policy, self.reference_policy, rows, advantage, self.estimator, self.config.kl_coef)

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs of clipped updates on a rollout."""
        config = self.config
        self.update_reward_scale(batch)  # running standard deviation of the return
        rows = self.process_rollout(batch)  # scaled rewards, GAE on V(s), rows (B, ...)
        self.recorder.snapshot()  # weights of the rollout, if only seeds were recorded
        rate = cosine_rate(self.actor_optimizer, config, self.updates, self.total_updates)
        stats: dict[str, Any] = {"actor/lr": rate}
        epochs = Epochs(partial(self.minibatches, rows, batch.shape), config.epochs, self.actor_optimizer)
        for part, _ in epochs:
            with self.critic_in_background(part, stats):
                if self.updates < config.critic_warmup:
                    continue
                loss, info = self.loss(self.recorder.resample(part))
                if epochs.stop(info, config.target_kl):
                    break
                stats |= clipped_step(self.actor_optimizer, loss, info, config.grad_clip)
        return self.finish(batch, rows, stats | epochs.stats())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, frozen base, optimisers and reward scale."""
        own = {"base": self.base, "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own}
