"""Flow-GRPO: critic-free RL fine-tuning of a flow policy by comparing episodes of a start state (arXiv 2505.05470).

The flow is sampled by the stochastic differential equation with its marginals, whose steps are Gaussian (`sde_chain`).
Several episodes run from each start state; the return of an episode, standardised within its group, is the advantage of
all its decisions and denoising steps. Every step has its own ratio, on log-probabilities averaged over dimensions, and
a KL penalty keeps the means near the frozen base.

Use it with short episodes that can restart from a state, when a critic is hard to learn, as with images and few
environments. For long episodes use flow_sde or reinflow. Groups with equal returns have advantage 0 and, as in the
public code, no loss, including the KL penalty.

Deviations from the public code for text-to-image models: the start state replaces the prompt; the KL is between
Gaussian steps, so the published weight, on a KL without the step size, corresponds to one K times smaller; training and
evaluation use the same number of steps; returns are undiscounted. Ratios of small chunks vary more than in image
models, hence a wider clip than the published 1e-4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, frozen_copy, make_metrics
from robopolicy.algorithms.common.fine_tuning import (
    ChainConfig,
    ChainRecorder,
    PolicyGradientConfig,
    actor_adam,
    clipped_step,
    cosine_rate,
)
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, balance, minibatches
from robopolicy.constraints import AtLeastTwo, NonNegative, Positive, PositiveInt
from robopolicy.core.advantage import Baseline, ClipAdvantage, Pipeline, Scale, Scope
from robopolicy.core.decisions import Decisions, by_group
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.core.regularizers import gaussian_kl
from robopolicy.data.batches import GroupRollout
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.exploration.chain import require_family
from robopolicy.policies.exploration.flow_chains import SDEChain
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class FlowGRPOConfig(ChainConfig, PolicyGradientConfig):
    """Settings of Flow-GRPO."""

    group_size: AtLeastTwo = 8  # G, episodes per start state; must divide sim.num_envs (paper: 24)
    noise_level: Positive = 0.3  # c of the injected noise c sqrt((1 - t) / t) (paper, for images: 0.7)
    clip: Positive = 0.005  # ratio bounds per denoising step (paper: 1e-4)
    advantage_clip: Positive = 5.0  # largest absolute advantage
    kl_coef: NonNegative = 0.01  # weight of the KL to the frozen base, per dimension
    epochs: PositiveInt = 2  # passes over each rollout
    lr: Positive = 1e-4  # peak learning rate
    target_kl: Positive | None = None  # stop the epochs when the approximate KL exceeds this


def group_advantage(returns: Tensor, group: Tensor, limit: float) -> Tensor:
    """Standardise returns `(N,)` within their groups `(N,)` int64 and clamp them; 0 where all are equal."""
    scope = Scope(by_group)
    scale = Scale(scope, unbiased=False, eps=1e-4)
    stages = Pipeline([Baseline("mean", scope, singleton="zero"), scale, ClipAdvantage(limit)])
    return stages(returns, Decisions(logp_old=torch.zeros_like(returns)[:, None], group=group)).squeeze(1)


def sde_loss(
    policy: SDEChain, reference: SDEChain, rows: RolloutBatch, advantage: Tensor, estimator: Estimator, kl_coef: float
) -> tuple[Tensor, Info]:
    """Clipped surrogate with one ratio per denoising step, plus `kl_coef` times the KL to `reference` per dimension.

    `reference` is the chain of the frozen base, called only if `kl_coef` > 0; `advantage` is (B,) per decision.
    """
    mean, log_std = policy.transitions(rows.obs, rows.record)
    logp = policy.score(rows.record, mean, log_std).logp
    loss, info = estimator(Decisions(logp_old=rows.logp), advantage[:, None], logp)
    if kl_coef:
        with torch.no_grad():
            base_mean, _ = reference.transitions(rows.obs, rows.record)
        std = log_std.exp()
        info["kl_base"] = kl = gaussian_kl(mean, std, base_mean, std).mean()
        loss = loss + kl_coef * kl
    return loss, info


class FlowGRPO(Algorithm):
    """Group-relative policy gradient on the stochastic sampler of a flow policy."""

    name = "flow_grpo"
    config_class = FlowGRPOConfig
    data_source = "group"
    heads = ("flow", "shortcut", "meanflow")
    reference = "liu2025flowgrpo"
    distributed = True
    config: FlowGRPOConfig
    policy: SDEChain

    def __init__(self, config: FlowGRPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_family(policy, ("flow",), "Flow-GRPO", "use dppo for diffusion and ppo for a Gaussian")
        super().__init__(SDEChain(head, config.noise_level).eval(), total_updates=total_updates, seed=config.seed)
        self.config = config
        self.base, self.recorder = frozen_copy(head), ChainRecorder(self.policy, config)
        self.reference_policy = SDEChain(self.base, config.noise_level)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.estimator = Estimator(EstimatorConfig(bounds=ConstantBounds(config.clip)))

    def inference_policy(self) -> Policy:
        """The fine-tuned flow, sampled by its ODE."""
        return self.policy.head

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration and record its chain."""
        return self.recorder.sample(obs, generator=generator)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Clipped surrogate on one ratio per step plus the KL to the base, and metrics."""
        return sde_loss(self.policy, self.reference_policy, rows, rows.advantage, self.estimator, self.config.kl_coef)

    def update(self, batch: GroupRollout) -> Metrics:
        """Run several epochs of clipped updates on a group rollout."""
        config = self.config
        advantage = group_advantage(batch.returns, batch.group, config.advantage_clip)  # (N,)
        rows = balance(nonzero_advantage_rows(batch, advantage))
        self.recorder.snapshot()  # weights of the rollout, if only seeds were recorded
        rate = cosine_rate(self.actor_optimizer, config, self.updates, self.total_updates)
        stats: dict[str, Any] = {"actor/lr": rate, "actor/nonzero_advantage_fraction": (advantage != 0).float().mean()}
        draw = partial(minibatches, rows, config.batch_size, self.generator)
        epochs = Epochs(draw, config.epochs, self.actor_optimizer)
        for part, _ in epochs:
            loss, info = self.loss(self.recorder.resample(part))
            if epochs.stop(info, config.target_kl):
                break
            stats |= clipped_step(self.actor_optimizer, loss, info, config.grad_clip)
        self.policy.update_stats({key: value[batch.valid] for key, value in batch.obs.items()})
        self.updates += 1
        return make_metrics(stats | epochs.stats())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Policy, frozen base and optimiser."""
        return {"policy": self.policy, "base": self.base, "actor_optimizer": self.actor_optimizer}


def nonzero_advantage_rows(batch: GroupRollout, advantage: Tensor) -> RolloutBatch:
    """The B decisions whose episode `(N,)` has a nonzero advantage, with that advantage."""
    per_step = advantage.expand(batch.shape)
    chosen = (batch.valid & (per_step != 0)).nonzero(as_tuple=True)
    returns = batch.returns.expand(batch.shape)[chosen]
    obs = {key: value[chosen] for key, value in batch.obs.items()}
    record = {key: value[chosen] for key, value in batch.record.items()}
    return RolloutBatch(obs, record, batch.logp[chosen], per_step[chosen], returns, torch.zeros_like(returns))
