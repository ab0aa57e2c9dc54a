"""ReinFlow: online RL fine-tuning of a flow policy by noise injection (Zhang et al. 2025).

A small network adds Gaussian noise to every Euler step of the pretrained flow, which turns the deterministic sampler
into a Markov chain with exact transition densities. The whole chain is one decision: its log-probabilities, averaged
over transitions and action dimensions, enter a clipped policy gradient with GAE on V(s). The noise network is discarded
at deployment.

Use it with the weights of a flow policy that sometimes succeeds, and a simulator. For black-box policies steer the
noise instead (`dsrl_na`); a base that never succeeds under sparse reward cannot be improved.

Deviations from the public code: chains are sampled and scored on the same left grid {0, 1/K, ..., (K-1)/K} (the
published 1-RF head uses two grids, so its first ratio is not 1); truncated episodes bootstrap from the value of their
last observation and cut the trace. There, the density of the initial noise counts as a transition: it cancels from
every ratio, but the K others are divided by K + 1, so `clip` and `entropy_coef` are effectively (K + 1) / K times
tighter here. The last iterate is scored as drawn and then clipped to the action bounds (the code: clipped and then
scored, with a density that is not the one of the clipped action). The epochs stop before the step whose minibatch
exceeds `target_kl` (the code: after it). The published clamp on the normalised log-probability (`logp_clamp=1`) is off
here, because without that extra transition it stops the gradient of small noise; where it is on, `actor/clamped`
reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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
from robopolicy.constraints import NonNegative, Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.exploration.chain import require_family
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class ReinFlowConfig(ChainConfig, FineTuningConfig):
    """Settings of ReinFlow; defaults are the paper's for states, except as noted in docs/methods/denoising_chain.md."""

    clip: Positive = 0.01  # ratio bounds on the normalised log-probability
    entropy_coef: NonNegative = 0.03  # weight of the mean entropy of the chain
    bc_coef: NonNegative = 0.0  # weight of the squared distance to the base's deterministic chunk ("W2")
    logp_clamp: Positive | None = None  # of the normalised log-probability; stops the gradient of small noise
    noise: NoiseConfig = field(default_factory=NoiseConfig)  # bounds and schedule of the injected noise


def chain_logp(logp: Tensor, dims: int, clamp: float | None) -> Tensor:
    """One log-probability per chain `(B, 1)`: mean over the K transitions `(B, K)` and the D action dimensions."""
    mean = logp.mean(1, keepdim=True) / dims
    return mean if clamp is None else mean.clamp(-clamp, clamp)


def reinflow_loss(
    policy: StochasticFlow, rows: RolloutBatch, estimator: Estimator, config: ReinFlowConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate on whole-chain ratios, minus the entropy bonus."""
    dims = policy.spec.horizon * policy.spec.action_dim
    output = policy.decisions(rows.obs, rows.record)
    new, old = (chain_logp(logp, dims, config.logp_clamp) for logp in (output.logp, rows.logp))
    entropy = output.entropy.mean(1, keepdim=True) / dims
    loss, info = estimator(Decisions(logp_old=old), normalize(rows.advantage)[:, None], new, entropy)
    if config.logp_clamp is not None:
        info["clamped"] = (new.detach().abs() >= config.logp_clamp).float().mean()
    return loss, info


def bc_loss(policy: GenerativePolicy, base: Policy, obs: Observation) -> Tensor:
    """Mean squared distance of the chunks of both policies from zero noise, in normalised units."""
    batch = next(iter(obs.values())).shape[0]
    noise = next(policy.parameters()).new_zeros(batch, policy.spec.horizon, policy.spec.action_dim)
    with torch.no_grad():
        target = policy.action_normalizer.normalize(base.decode(obs, noise))
    return nn.functional.mse_loss(policy.action_normalizer.normalize(policy.decode(obs, noise)), target)


class ReinFlow(OnPolicy):
    """PPO on the noise-injected denoising chain of a flow policy."""

    name = "reinflow"
    config_class = ReinFlowConfig
    data_source = "rollout"
    heads = ("flow", "shortcut", "meanflow")
    reference = "zhang2025reinflow"
    distributed = True
    config: ReinFlowConfig
    policy: StochasticFlow

    def __init__(self, config: ReinFlowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_family(policy, ("flow",), "ReinFlow", "use dppo for diffusion and ppo for a Gaussian")
        super().__init__(config, StochasticFlow(head, config.noise), total_updates=total_updates)
        self.base, self.recorder = frozen_copy(head), ChainRecorder(self.policy, config)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        bounds = ConstantBounds(config.clip)
        self.estimator = Estimator(EstimatorConfig(bounds=bounds, entropy_coef=config.entropy_coef))

    def inference_policy(self) -> Policy:
        """The fine-tuned flow without the noise network."""
        return self.policy.head

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration and record its chain."""
        return self.recorder.sample(obs, generator=generator)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Clipped surrogate on whole-chain ratios, entropy bonus and distance to the base, and metrics."""
        loss, info = reinflow_loss(self.policy, rows, self.estimator, self.config)
        if self.config.bc_coef:
            info["bc_loss"] = bc = bc_loss(self.policy.head, self.base, rows.obs)
            loss = loss + self.config.bc_coef * bc
        return loss, info

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
        metrics = self.finish(batch, rows, stats | epochs.stats())
        self.policy.set_progress(self.progress)  # after the gradient steps, so that first ratios are 1
        return metrics

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, frozen base, optimisers and reward scale."""
        own = {"base": self.base, "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own}
